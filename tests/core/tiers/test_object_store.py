"""The store by obstore: what it refuses, and what its messages hide."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from resume_adapters import KeepLast, Remote
from resume_adapters.core.tiers.object_store import ObjectStore, hide_secrets
from resume_adapters.core.tiers.options import require_mirrors
from resume_adapters.errors import MissingFramework, TierUnavailable, UnsupportedSetting
from waiting import LIMIT

SHORT = timedelta(seconds=1)


def test_a_directory_is_a_store(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/a b", SHORT)
    store.create("x/one", b"1")
    with pytest.raises(FileExistsError):
        store.create("x/one", b"2")
    store.put("x/a=b c%.bin", b"22")
    assert store.list("x/") == {"x/one": 1, "x/a=b c%.bin": 2} and store.list("y/") == {}
    store.discard(["x/gone", "x/one", "x/a=b c%.bin"])
    assert store.list() == {}
    with pytest.raises(FileNotFoundError):
        store.get("x/one", 9)


def test_what_the_client_says_is_repeated_without_credentials(tmp_path: Path) -> None:
    environment = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "127.0.0.1",  # so that the message has it
        "AWS_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        store = ObjectStore("s3://bucket/run", timedelta(milliseconds=1))
        with pytest.raises(TierUnavailable, match=r"could not read s3://bucket/run/a") as raised:
            store.get("a", 9)
    assert "127.0.0.1" not in str(raised.value) and "***" in str(raised.value)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_the_password_of_a_proxy_is_not_repeated() -> None:
    said = "error trying to connect: proxy http://me:very%20secret@proxy.local:3128 refused s3://bucket/a@b"
    hidden = "error trying to connect: proxy http://***@proxy.local:3128 refused s3://bucket/a@b"
    assert hide_secrets(said, {"HTTPS_PROXY": "http://me:very%20secret@proxy.local:3128"}) == hidden


def test_a_store_that_does_not_answer_is_waited_for_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not a secret")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = ObjectStore("s3://bucket/run", timedelta(seconds=0.5))
        began = time.monotonic()
        with pytest.raises(TierUnavailable, match="could not read"):
            store.get("a", 9)
        assert time.monotonic() - began < LIMIT


def test_a_missing_client_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingFramework, match=r"pip install 'obstore>=0\.8'"):
        ObjectStore("memory://x", SHORT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "runs/a"}, "is not a URL"),
        ({"url": "sftp://host/runs/a"}, "unknown scheme; expected s3, gs, az, hf or file, such as file:///mnt/runs/a"),
        ({"url": "s3://key:secret@bucket/a"}, "has credentials or a query"),
        ({"url": "s3://bucket/a?versionId=1"}, "has credentials or a query"),
        ({"url": "s3:///a"}, "names no bucket"),
        ({"every": 0}, "positive number of saves"),
        ({"keep": 3}, "keep must be a Policy"),
        ({"on_behind": "ignore"}, '"warn" or "stop"'),
        ({"timeout": 3}, "positive timedelta"),
    ],
)
def test_an_invalid_option_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedSetting, match=said) as raised:
        Remote(**{"url": "memory://a", **options})  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "given", ["s3://bucket/a", Remote("memory://a"), ["s3://bucket/a"], [Remote("memory://a")] * 2]
)
def test_what_is_no_list_of_tiers_is_refused(given: object) -> None:

    with pytest.raises(UnsupportedSetting, match="mirror="):
        require_mirrors(given)
    require_mirrors([Remote("memory://a", keep=KeepLast(1)), Remote("memory://b")])


def test_nothing_is_read_or_written_through_a_link_or_from_a_pipe(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "store"
    (outside / "within").mkdir(parents=True)
    (outside / "secret").write_text("secret")
    store = ObjectStore(root.as_uri(), SHORT)
    store.put("a/b", b"mine")
    (root / "link").symlink_to(outside / "secret")
    (root / "a" / "directory").symlink_to(outside)
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe")
    assert store.list() == {"a/b": 4} and store.list("a") == {"a/b": 4} and store.list("missing") == {}
    for key in ("link", "a/directory/secret", "loop/a/b", "pipe"):
        with pytest.raises(TierUnavailable, match="is a link, a pipe or a device"):
            store.get(key, 100)
        with pytest.raises(TierUnavailable, match="is a link, a pipe or a device"):
            store.put(key, b"changed")
        with pytest.raises(TierUnavailable, match="is a link, a pipe or a device"):
            store.discard(["a/b", key])
    assert (outside / "secret").read_text() == "secret" and store.get("a/b", 4) == b"mine"
