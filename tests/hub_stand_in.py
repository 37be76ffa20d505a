"""A stand-in for the Hugging Face Hub on this machine: what its real client asks of repositories.

Large files go to a storage of LFS. It knows neither Xet nor branches. A commit is atomic, and refused where its parent
is no longer the newest one.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TOKEN = "hf_a_token_of_the_tests"

Tree = dict[str, bytes]
"""The files of a revision; a large one is the digest of its content, after ``lfs:``."""


@dataclass
class Repository:
    """A repository, with all its revisions, oldest first."""

    private: bool
    revisions: dict[str, Tree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.add({".gitattributes": b""})

    @property
    def head(self) -> str:
        return next(reversed(self.revisions))

    def add(self, tree: Tree) -> str:
        oid = hashlib.sha1(f"{len(self.revisions)}".encode()).hexdigest()
        self.revisions[oid] = tree
        return oid


class Refused(Exception):
    """An answer that is an error: its status, the Hub's code for it, and a message."""


class Hub:
    """The stand-in.

    Attributes:
        repositories: by kind and name, such as ``models/me/runs``.
        objects: the contents of large files, by their SHA-256.
        requests: the method and the path of all requests so far.
        before: is called before each request, with its number, its method and its path; may raise :class:`Refused`.

    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[int, str, str], object] = lambda number, method, path: None
        self.lock = threading.RLock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer takes 40 ms: its head waits for a client that waits

            def handle_any(self) -> None:
                hub.answer(self)

            do_GET = do_PUT = do_POST = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which the client finds it."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def files(self, name: str) -> dict[str, bytes]:
        """Return the files of the newest revision of a repository, with the contents of the large ones."""
        repository = self.repositories[name]
        return {path: self.content(blob) for path, blob in repository.revisions[repository.head].items()}

    def content(self, blob: bytes) -> bytes:
        return self.objects[blob.removeprefix(b"lfs:").decode()] if blob.startswith(b"lfs:") else blob

    # ---- Requests

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = _body(handler)
        found = urllib.parse.urlsplit(handler.path)
        path = urllib.parse.unquote(found.path)
        with self.lock:
            number = len(self.requests)
            self.requests.append((handler.command, path))
        headers: dict[str, str] = {}
        try:
            self.before(number, handler.command, path)
            with self.lock:
                status, headers, content = self._answer(handler, path, body)
        except Refused as refused:
            status, code, message = refused.args
            headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {"X-Error-Message": message}
            content = json.dumps({"error": message}).encode()
        except ConnectionAbortedError:
            handler.close_connection = True
            return
        with contextlib.suppress(OSError):
            handler.send_response_only(status)
            for name, value in headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)

    def _answer(self, handler: BaseHTTPRequestHandler, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        is_known = handler.headers.get("Authorization") == f"Bearer {TOKEN}"
        words = path.strip("/").split("/")
        kind = words.pop(0) if words[0] == "datasets" else "models"
        match words:
            case ["objects", oid]:  # the storage: what is asked there was signed
                return self._object(handler, oid, body)
            case ["api", "repos", "create"]:
                return self._create(json.loads(body), is_known)
            case ["api", kind, owner, name, *rest]:
                return self._api(f"{kind}/{owner}/{name}", rest, body, is_known)
            case [owner, name, "info", "lfs", "objects", "batch"]:
                self._repository(f"{kind}/{owner}/{name.removesuffix('.git')}", is_known, writes=True)
                objects = [self._upload_of(handler, each) for each in json.loads(body)["objects"]]
                return _json({"transfer": "basic", "objects": objects})
            case [owner, name, "resolve", revision, *key]:
                return self._resolve(handler, self._tree(f"{kind}/{owner}/{name}", revision, is_known), "/".join(key))
        raise Refused(404, "", f"nothing is known of {path}")

    def _repository(self, name: str, is_known: bool, *, writes: bool = False) -> Repository:
        found = self.repositories.get(name)
        if found is None or (found.private and not is_known):
            raise Refused(404 if is_known else 401, "RepoNotFound", "Repository not found")
        if writes and not is_known:
            raise Refused(403, "", "Forbidden: you must use a write token to upload")
        return found

    def _tree(self, name: str, revision: str, is_known: bool) -> Tree:
        repository = self._repository(name, is_known)
        oid = repository.head if revision == "main" else revision
        if oid not in repository.revisions:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository.revisions[oid]

    def _create(self, asked: dict[str, Any], is_known: bool) -> tuple[int, dict[str, str], bytes]:
        if not is_known:
            raise Refused(401, "", "Invalid username or password.")
        owner = asked.get("organization") or "me"
        name = f"{asked.get('type') or 'model'}s/{owner}/{asked['name']}"
        if owner != "me":
            raise Refused(403, "", f"You don't have the rights to create a model under the namespace {owner!r}")
        if name in self.repositories:
            raise Refused(409, "", "You already created this model repo")
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.repositories[name] = Repository(private)
        return _json({"url": f"{self.endpoint}/{name.removeprefix('models/')}"})

    def _api(self, name: str, rest: list[str], body: bytes, is_known: bool) -> tuple[int, dict[str, str], bytes]:
        match rest:
            case [] | ["revision", _]:
                repository = self._repository(name, is_known)
                return _json({"id": name.split("/", 1)[1], "sha": repository.head, "tags": [], "siblings": []})
            case ["tree", revision, *folder]:
                return _json(self._listed(self._tree(name, revision, is_known), "/".join(folder)))
            case ["paths-info", revision]:
                tree = self._tree(name, revision, is_known)
                paths = urllib.parse.parse_qs(body.decode())["paths"]
                return _json([self._described(path, tree[path]) for path in paths if path in tree])
            case ["preupload", revision]:
                self._repository(name, is_known, writes=True)
                tree = self._tree(name, revision, is_known)
                asked = json.loads(body)
                ignored = asked.get("gitIgnore", tree.get(".gitignore", b"").decode()).split()
                return _json({"files": [_preupload(each, tree, ignored) for each in asked["files"]]})
            case ["commit", _]:
                return self._commit(self._repository(name, is_known, writes=True), body)
        raise Refused(404, "", f"nothing is known of {rest}")

    def _listed(self, tree: Tree, folder: str) -> list[dict[str, Any]]:
        prefix = folder and f"{folder}/"
        found = [self._described(path, blob) for path, blob in sorted(tree.items()) if path.startswith(prefix)]
        if not found:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist")
        folders = {path.rsplit("/", 1)[0] for path in tree if path.startswith(prefix) and "/" in path}
        return found + [{"type": "directory", "path": each, "oid": "0" * 40, "size": 0} for each in folders - {folder}]

    def _described(self, path: str, blob: bytes) -> dict[str, Any]:
        size = len(self.content(blob))
        found = {"type": "file", "path": path, "size": size, "oid": _git_hash(blob)}
        if blob.startswith(b"lfs:"):
            found["lfs"] = {"oid": blob[4:].decode(), "size": size, "pointerSize": 134}
        return found

    def _commit(self, repository: Repository, body: bytes) -> tuple[int, dict[str, str], bytes]:
        tree = dict(repository.revisions[repository.head])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    if value.get("parentCommit", repository.head) != repository.head:
                        raise Refused(412, "", "A commit has happened since. Please refresh and try again.")
                case "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in self.objects:
                        raise Refused(400, "", f"LFS pointer {value['path']} points to a file that does not exist")
                    tree[value["path"]] = b"lfs:" + value["oid"].encode()
                case "deletedFile":
                    if value["path"] not in tree:
                        raise Refused(404, "EntryNotFound", "A file with this name doesn't exist")
                    del tree[value["path"]]
        oid = repository.add(tree)
        return _json({"success": True, "commitOid": oid, "commitUrl": f"{self.endpoint}/me/x/commit/{oid}"})

    # ---- Large files

    def _upload_of(self, handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.objects:
            return asked
        return {**asked, "actions": {"upload": {"href": f"http://{handler.headers['Host']}/objects/{asked['oid']}"}}}

    def _object(self, handler: BaseHTTPRequestHandler, oid: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if handler.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                raise Refused(400, "", "The content has another SHA-256 than was said")
            self.objects[oid] = body
            return 200, {}, b""
        return _ranged(handler, self.objects[oid])

    def _resolve(self, handler: BaseHTTPRequestHandler, tree: Tree, key: str) -> tuple[int, dict[str, str], bytes]:
        if key not in tree:
            raise Refused(404, "EntryNotFound", "Entry not found")
        if tree[key].startswith(b"lfs:"):
            return 302, {"Location": f"http://{handler.headers['Host']}/objects/{tree[key][4:].decode()}"}, b""
        return _ranged(handler, tree[key])


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding") != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    found = b""
    while size := int(handler.rfile.readline(), 16):
        found += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return found


def _json(content: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _git_hash(blob: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest()


def _preupload(asked: dict[str, Any], tree: Tree, ignored: list[str]) -> dict[str, Any]:
    """Say how a file is to be uploaded: as the Hub's own ``.gitattributes`` and its limit of 10 MB for others do."""
    is_large = asked["path"].endswith((".bin", ".safetensors", ".pt", ".pth", ".ckpt")) or asked["size"] > 10 << 20
    there = tree.get(asked["path"])
    oid = None if there is None else there[4:].decode() if there.startswith(b"lfs:") else _git_hash(there)
    is_ignored = any(fnmatch.fnmatch(asked["path"], each) for each in ignored)
    mode = "lfs" if is_large else "regular"
    return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": is_ignored, "oid": oid}


def _ranged(handler: BaseHTTPRequestHandler, content: bytes) -> tuple[int, dict[str, str], bytes]:
    asked = handler.headers.get("Range")
    if asked is None:
        return 200, {}, content
    begin, end = (int(each) for each in asked.removeprefix("bytes=").split("-"))
    if begin >= len(content):
        raise Refused(416, "", "Range not satisfiable")
    part = content[begin : end + 1]
    return 206, {"Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"}, part


@contextlib.contextmanager
def running(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a stand-in, which the client finds in this process and in those that it starts."""
    from huggingface_hub import constants

    hub = Hub()
    for name, value in hub.environment.items():
        patch.setenv(name, value)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    patch.setattr(constants, "ENDPOINT", hub.endpoint)  # which was read when the client was imported
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield hub
    hub.close()
