"""The laws of a mirror in a repository of the Hugging Face Hub: the real client, and a stand-in for the Hub."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tqdm import tqdm

from resume_adapters import KeepLast, Remote
from resume_adapters.core.checkpoint.manifest import decode_manifest
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers import hub as hub_store
from resume_adapters.core.tiers import mirrors
from resume_adapters.core.tiers.hub import HubStore
from resume_adapters.errors import CheckpointDamaged, MissingFramework, TierUnavailable, UnsupportedSetting
from selection import often
from waiting import LIMIT, until

import hub_stand_in
from hub_stand_in import Hub, Refused
from miniature import Miniature
from object_stores import retry_soon

pytest.importorskip("huggingface_hub", reason="the extra `hub` installs huggingface_hub")

URL, NAME = "hf://me/runs/a", "models/me/runs"

PATIENCE = timedelta(seconds=LIMIT)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    retry_soon(monkeypatch)
    mirrors._USED.clear()
    with hub_stand_in.running(monkeypatch) as found:
        yield found


def train(directory: Path, *steps: int, url: str = URL, **options: object) -> None:
    """Commit some steps, each with its copy."""
    job = Miniature(directory, mirror=[Remote(url, **{"timeout": PATIENCE, **options})])  # type: ignore[arg-type]
    job.run.begin(job.step, 0.0)
    for step in steps:
        job.commit(step)
        until(lambda: not any(state.behind for state in job.run.context.mirrors.states))
    job.run.close()


def resumed(directory: Path, url: str = URL) -> tuple[int, str]:
    """Lose the run directory, and return the step and the state from which the same start resumes."""
    shutil.rmtree(directory, ignore_errors=True)
    mirrors._USED.clear()
    job = Miniature(directory, mirror=[Remote(url, timeout=PATIENCE)])
    job.run.close()
    return job.step, job.text


def require_whole_revisions(hub: Hub, name: str = NAME) -> int:
    """Require all files of each manifest in each revision; return how many manifests the last one has."""
    markers: list[str] = []
    for tree in hub.repositories[name].revisions.values():
        markers = [key for key in tree if key.endswith("/resume/manifest.json")]
        for marker in markers:
            place = marker.removesuffix("resume/manifest.json")
            for entry in decode_manifest(hub.content(tree[marker])).files:
                assert len(hub.content(tree[place + entry.path])) == entry.bytes, entry.path
    return len(markers)


@pytest.mark.parametrize("url", often([URL, "hf://me/runs", "hf://datasets/me/runs/b/c"], URL))
def test_an_empty_machine_resumes(tmp_path: Path, hub: Hub, url: str) -> None:
    train(tmp_path / "a", 1, 2, 3, url=url)
    assert resumed(tmp_path / "a", url) == (3, "state at 3")
    name = "datasets/me/runs" if "datasets" in url else NAME
    assert list(hub.repositories) == [name] and hub.repositories[name].private
    assert require_whole_revisions(hub, name) == 3


def test_a_checkpoint_is_one_commit_and_one_that_is_removed_another(tmp_path: Path, hub: Hub) -> None:
    """The Hub counts commits."""
    train(tmp_path, 1, 2, 3, keep=KeepLast(1))
    commits = [path for _, path in hub.requests if "/commit/" in path]
    assert len(commits) == 1 + 3 + 2, "the claim, three checkpoints, and two that were removed"
    assert require_whole_revisions(hub) == 1
    (files,) = ({key.split("/")[1] for key in hub.files(NAME) if key.startswith("a/checkpoint-")},)
    assert files == {"checkpoint-3"}, "nothing is left of those that were removed"


def job(directory: Path) -> None:
    """What the process that is killed does."""
    mirrors._USED.clear()
    tqdm.set_lock(threading.RLock())  # whoever is killed with that of all processes leaves it to nobody
    train(directory, 2, 3, 4)


KILLS = [1, 8, 13, 14, 15, 16, 17, 18, 20, 22, *range(23, 60, 4)]
"""The requests within which the process is killed."""


@pytest.mark.parametrize("request_number", often(map(str, KILLS)))
def test_a_process_that_is_killed_in_a_request_leaves_no_torn_checkpoint(
    tmp_path: Path, hub: Hub, request_number: str
) -> None:
    """SIGKILL while a request of it is under way: what was asked may happen, and the newest manifest resumes."""
    number = int(request_number)
    train(tmp_path / "first", 1)
    hub.requests.clear()
    process = multiprocessing.get_context("fork").Process(target=job, args=(tmp_path / "run",))

    def kill(count: int, method: str, path: str) -> None:
        if count == number:
            os.kill(process.pid or 0, signal.SIGKILL)

    hub.before = kill
    process.start()
    process.join(LIMIT)
    assert process.exitcode == (-signal.SIGKILL if len(hub.requests) > number else 0)
    hub.before = lambda count, method, path: None
    newest = require_whole_revisions(hub)
    assert resumed(tmp_path / "run") == (newest, f"state at {newest}")


def test_a_large_file_is_read_by_the_client_and_fetched_in_parts(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_store, "_LARGEST_IN_MEMORY", 10)
    monkeypatch.setattr(hub_store, "_PART", 50)
    train(tmp_path, 1, 2)
    hub.requests.clear()
    assert resumed(tmp_path) == (2, "state at 2")
    assert sum("model.bin" in path for _, path in hub.requests) > 2


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [lambda content: bytes([content[0] ^ 1]) + content[1:], lambda content: b""])
def test_a_damaged_object_is_found_and_the_checkpoint_before_taken(
    tmp_path: Path, hub: Hub, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1)
    before = {*hub.objects}
    train(tmp_path, 2)
    for oid in hub.objects.keys() - before:
        hub.objects[oid] = damage(hub.objects[oid])
    assert resumed(tmp_path) == (1, "state at 1")
    assert "checkpoint-2" in caplog.text


def test_of_several_that_create_a_file_one_succeeds(hub: Hub) -> None:
    HubStore(URL, PATIENCE, makes=True).list()
    created, meeting = list[int](), threading.Barrier(4)

    def create(number: int) -> None:
        store = HubStore(URL, PATIENCE)
        meeting.wait(LIMIT)
        try:
            store.create(".resume/claims/1", b"%d" % number)
        except FileExistsError:
            return
        created.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT)
    assert len(created) == 1 and HubStore(URL, PATIENCE).get(".resume/claims/1", 9) == b"%d" % created[0]


def test_a_commit_of_somebody_else_is_no_claim(hub: Hub) -> None:
    """The parent of a claim is the revision in which it was looked for."""
    store = HubStore(URL, PATIENCE, makes=True)
    store.list()
    others = iter(range(3))

    def commit(count: int, method: str, path: str) -> None:
        if path.endswith("/commit/main") and next(others, None) is not None:
            repository = hub.repositories[NAME]
            repository.add(dict(repository.revisions[repository.head]))

    hub.before = commit
    store.create("x", b"1")
    assert hub.files(NAME)["a/x"] == b"1"


def test_a_repository_that_ignores_files_gets_them(tmp_path: Path, hub: Hub) -> None:
    hub.repositories[NAME] = hub_stand_in.Repository(private=True)
    hub.repositories[NAME].add({".gitignore": b"*.bin *.json"})
    train(tmp_path, 1)
    assert require_whole_revisions(hub) == 1 and resumed(tmp_path) == (1, "state at 1")


# ---- What does not answer


@pytest.mark.parametrize("status", [429, pytest.param(503, marks=pytest.mark.thorough)])
def test_a_commit_that_is_refused_is_tried_again(tmp_path: Path, hub: Hub, status: int) -> None:
    refused = iter(range(2))

    def refuse(count: int, method: str, path: str) -> None:
        if (
            path.endswith("/commit/main")
            and len(hub.repositories[NAME].revisions) > 2
            and next(refused, None) is not None
        ):
            raise Refused(status, "", "too many commits")

    hub.before = refuse
    train(tmp_path, 1, 2)
    assert "too many commits" in (tmp_path / ".resume" / "journal.jsonl").read_text()
    assert require_whole_revisions(hub) == 2 and resumed(tmp_path) == (2, "state at 2")


def test_a_hub_that_does_not_answer_is_waited_for_as_long_as_was_said(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store, began = HubStore(URL, timedelta(seconds=0.5), makes=True), time.monotonic()
        for ask in (store.list, lambda: store.create("a", b""), lambda: store.put("a", b""), lambda: store.get("a", 9)):
            with pytest.raises(TierUnavailable, match=r"could not \w+ hf://me/runs/a/.*no answer in"):
                ask()
        assert time.monotonic() - began < LIMIT


@pytest.mark.parametrize("token", ["", "hf_of_somebody_else"])
def test_a_repository_that_the_token_may_not_see_is_not_taken_for_an_empty_one(
    tmp_path: Path, hub: Hub, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "a", 1)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(TierUnavailable, match="does not begin from zero") as raised:
        resumed(tmp_path / "b")
    assert token == "" or token not in str(raised.value)


def test_a_namespace_of_somebody_else_is_refused(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(TierUnavailable, match="403 Forbidden: You don't have the rights") as raised:
        resumed(tmp_path, "hf://them/runs/a")
    assert hub_stand_in.TOKEN not in str(raised.value)


def test_what_only_reads_makes_no_repository(hub: Hub) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "resume_adapters.cli", "ls", URL], capture_output=True, text=True, timeout=LIMIT
    )
    assert found.returncode != 0 and "Repository not found" in found.stderr.replace("\n", " ")
    assert not hub.repositories


@pytest.mark.thorough
def test_the_commands_know_repositories(tmp_path: Path, hub: Hub) -> None:
    train(tmp_path / "a", 1, 2)
    done = {}
    other = "hf://me/runs/pushed"
    for words in (
        ["ls", URL],
        ["verify", URL],
        ["pull", URL, str(tmp_path / "b"), "1"],
        ["push", str(tmp_path / "b"), other],
    ):
        command = [sys.executable, "-m", "resume_adapters.cli", *words]
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert found.returncode == 0, found.stderr
        done[words[0]] = found.stdout
    assert done["ls"].count("committed") == 2 and done["verify"].count("valid") == 2
    assert resumed(tmp_path / "c", other) == (1, "state at 1")


# ---- What is refused


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hf://buckets/me/runs", "a bucket of the Hub overwrites what exists"),
        ("hf://me", "names no repository of the Hub; expected hf://OWNER/NAME or hf://datasets/OWNER/NAME"),
        ("hf://datasets/me", "names no repository"),
        ("hf://spaces/me/runs", "names no repository"),
        ("hf://me/runs@main/a", "names no repository"),
        ("hf://token@me/runs", "has credentials"),
    ],
)
def test_what_is_no_repository_is_refused(url: str, said: str) -> None:
    with pytest.raises(UnsupportedSetting, match=said):
        Remote(url)


def test_a_missing_client_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingFramework, match=r"pip install 'huggingface_hub>=0\.34'"):
        HubStore(URL, PATIENCE)


def test_a_run_without_it_does_not_import_the_client(tmp_path: Path) -> None:
    program = f"""
import sys, miniature
from pathlib import Path
from resume_adapters import Remote
job = miniature.Miniature(Path({str(tmp_path / "run")!r}), mirror=[Remote({(tmp_path / "store").as_uri()!r})])
job.commit(1)
job.run.finish_copies()
job.run.close()
assert "huggingface_hub" not in sys.modules
"""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": paths}, timeout=LIMIT)


def test_an_object_that_is_larger_than_was_said_is_not_read(hub: Hub) -> None:
    store = HubStore(URL, PATIENCE, makes=True)
    store.put("place/a", b"123")
    with pytest.raises(CheckpointDamaged, match="has 3 bytes; expected at most 2"):
        store.get("place/a", 2)
    with pytest.raises(FileNotFoundError):
        store.get("place/b", 2)
    store.put("place/empty", b"")
    assert store.get("place/empty", 0) == b"" and b"".join(store.get_pieces("place/a", 3)) == b"123"
    store.discard(["place/gone", "place/a"])
    assert store.list("place/") == {"place/empty": 0} and store.list("other/") == {}


def test_what_another_rank_has_uploaded_is_stored_by_itself(tmp_path: Path, hub: Hub) -> None:
    """Each rank has a store of its own; the manifest is written by the first."""
    file, storage = tmp_path / "b", LocalStorage()
    file.write_bytes(b"of rank one")
    store = HubStore(URL, PATIENCE, makes=True)
    store.put_pieces("place/@1/b", iter([b"of rank one"]), storage.size(file), file)
    assert store.list() == {"place/@1/b": 11} and "a/place/@1/b" not in hub.files(NAME)
    store.flush()
    store.flush()
    assert hub.files(NAME)["a/place/@1/b"] == b"of rank one"
    store.put_pieces("place/@1/c", iter([b"given up"]), 8, file)
    store.put_pieces("place/@2/d", iter([b"taken"]), 5, file)
    store.put("place/@2/manifest", b"{}")
    assert {"a/place/@2/d", "a/place/@2/manifest"} <= hub.files(NAME).keys()
    assert "a/place/@1/c" not in hub.files(NAME)
