"""Object stores that run on this machine, and a proxy before them that has faults."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from waiting import until

from launch import free_port

KEY, SECRET = "testaccesskey", "testsecretsecret"

Fault = Callable[[int, str, str], str | None]
"""Returns what goes wrong with a request, by its number, its method and its path; ``None``: nothing."""


def environment(port: int) -> dict[str, str]:
    """Return the variables with which S3 is at a port of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def find(program: str) -> str | None:
    """Return the path of a server that ``nox -s remote`` installs; ``None`` where it is not installed."""
    return shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def wait_for(port: int) -> None:
    """Wait until somebody listens on a port."""

    def is_open() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10.0):
            return True
        return False

    until(is_open, lambda: f"nobody listens on {port}")


@contextlib.contextmanager
def moto() -> Iterator[int]:
    """Run moto in this process, with a bucket ``bucket``; yield its port."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
    yield port
    server.stop()


class Process:
    """A server that is a process.

    Args:
        command: starts it.
        port: where it listens.
        log: gets its output.
    """

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command = command
        self.port = port
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._launch()
        wait_for(self.port)

    def start_if_ended(self) -> None:
        """Start it again, if it has ended by itself: another process may have had one of its ports for a while."""
        if self._process is not None and self._process.poll() is not None:
            self._launch()

    def _launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


def rclone(directory: Path) -> Process:
    """Return rclone's S3, which accepts conditions and overwrites; each directory in its own is a bucket."""
    (directory / "bucket").mkdir(parents=True)
    port = free_port()
    words = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off"]
    return Process([str(find("rclone")), *words, str(directory)], port, directory.parent / "rclone.log")


def seaweed(directory: Path) -> Process:
    """Return SeaweedFS, with its files in a directory."""
    directory.mkdir()
    identity = {"name": "a", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, port = (free_port() for _ in range(4))
    words = [
        *("server", "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-dir", str(directory), "-volume.max", "20"),
        *("-master.port", str(master), "-master.port.grpc", str(free_port())),
        *("-master.electionTimeout", "1s", "-master.heartbeatInterval", "100ms"),  # else a restart takes 20 s
        *("-volume.port", str(volume), "-volume.port.grpc", str(free_port())),
        *("-filer", "-filer.port", str(filer), "-filer.port.grpc", str(free_port())),
        *("-s3", "-s3.port", str(port), "-s3.port.grpc", str(free_port()), "-s3.config", str(directory / "s3.json")),
    ]
    return Process([str(find("weed")), *words], port, directory.parent / "weed.log")


def make_bucket(port: int) -> None:
    """Create the bucket ``bucket`` where requests must be signed, as soon as the server can."""
    until(lambda: _put(port, "bucket", b"") in (200, 409), lambda: f"port {port} makes no bucket")


def until_writable(server: Process) -> None:
    """Wait until a server takes objects: one that was killed lists what it has before that."""

    def is_writable() -> bool:
        server.start_if_ended()
        return _put(server.port, "bucket/ready", b"yes") == 200

    until(is_writable, lambda: f"port {server.port} takes no object")


def _put(port: int, path: str, content: bytes) -> int:
    """Return the status of a request to create something; 0 where nobody answers."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest("PUT", f"http://127.0.0.1:{port}/{path}", data=content)
    S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(request)
    sent = urllib.request.Request(request.url, content or None, method="PUT", headers=dict(request.headers))
    try:
        with urllib.request.urlopen(sent, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Proxy:
    """Passes requests on to a server, and lets some go wrong.

    The faults: ``503``; ``timeout`` (the connection is cut without an answer); ``cut`` (an answer is half as long, and
    says so); ``flip`` (one bit of an answer); ``late`` (after the others).

    Args:
        upstream: the server's port.

    Attributes:
        fault: what goes wrong; may be replaced at any time.
        requests: the method and path of all requests so far.
    """

    def __init__(self, upstream: int) -> None:
        self.fault: Fault = lambda number, method, path: None
        self.requests: list[tuple[str, str]] = []
        self._upstream = upstream
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer takes 40 ms: its head waits for a client that waits

            def handle_any(self) -> None:
                proxy.pass_on(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        with self._lock:
            number = len(self.requests)
            self.requests.append((handler.command, handler.path))
        fault = self.fault(number, handler.command, handler.path)
        if fault == "503":
            self._answer(handler, 503, [], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "timeout":
            handler.close_connection = True
            return
        if fault == "late":
            time.sleep(0.1)
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        try:
            upstream.request(handler.command, handler.path, body, dict(handler.headers.items()))
            answer = upstream.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            handler.close_connection = True
            return
        finally:
            upstream.close()
        if fault == "cut" and len(content) > 1:
            content = content[: len(content) // 2]
        elif fault == "flip" and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        skipped = ("content-length", "transfer-encoding", "connection")
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
        length = answer.getheader("Content-Length") if handler.command == "HEAD" else None
        self._answer(handler, answer.status, headers, content, length)

    def _answer(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        content: bytes,
        length: str | None = None,
    ) -> None:
        with contextlib.suppress(OSError):
            handler.send_response_only(status)
            for name, value in headers:
                handler.send_header(name, value)
            handler.send_header("Content-Length", length or str(len(content)))
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(content)
