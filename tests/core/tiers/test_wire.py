"""Files from one node to another: only who has the token gets one, and what is cut off or changed is refused."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resume_adapters.core.tiers import serving, wire
from resume_adapters.core.tiers.serving import Address, Client, Server
from resume_adapters.core.tiers.wire import Content, Request, ask
from resume_adapters.errors import CheckpointDamaged, TierUnavailable
from waiting import LIMIT, until_ended

TOKEN = b"token of the start"
FILE = bytes(range(256)) * 9000
REQUEST = Request(3, "", "checkpoint-1", "model.bin")


def find(request: Request) -> Content:
    if request.path == "empty":
        return Content(0, iter(()))
    if request.path != "model.bin":
        raise CheckpointDamaged(f"{request.path} is not here")
    return Content(len(FILE), iter([FILE[:1000], FILE[1000:]]))


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(TOKEN, 3, find)
    yield found
    found.close()


def fetched(port: int, token: bytes = TOKEN, request: Request = REQUEST) -> bytes:
    return b"".join(ask(("127.0.0.1", port), token, request))


class Proxy:
    """Stands between a client and a server, and changes what the server sends.

    Args:
        port: of the server.
        change: gets all that the server has sent, and returns what the client gets.
    """

    def __init__(self, port: int, change: Callable[[bytes], bytes]) -> None:
        self._port, self._change = port, change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listening.accept()
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            client.sendall(server.recv(len(wire._MAGIC) + 32, socket.MSG_WAITALL))
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
            answer = b""
            while piece := server.recv(1 << 20):
                answer += piece
            with contextlib.suppress(OSError):  # the client has seen enough
                client.sendall(self._change(answer))
                client.shutdown(socket.SHUT_WR)
        self._listening.close()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(1 << 16):
                server.sendall(piece)


def test_a_file_arrives(server: Server) -> None:
    assert fetched(server.port) == FILE
    assert fetched(server.port, request=Request(3, "", "checkpoint-1", "empty")) == b""


def test_a_file_that_is_not_there_is_said(server: Server) -> None:
    with pytest.raises(CheckpointDamaged, match="is not here"):
        fetched(server.port, request=Request(3, "", "checkpoint-1", "optimizer.bin"))


def flip(at: int) -> Callable[[bytes], bytes]:
    def change(answer: bytes) -> bytes:
        position = at % len(answer)
        return answer[:position] + bytes([answer[position] ^ 1]) + answer[position + 1 :]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip(3), "another token"),
        (flip(8), "another token"),
        (flip(20000), "changed on the way"),
        (flip(-1), "changed on the way"),
        (lambda answer: answer[:-1], "too early"),
        (lambda answer: answer[:5000], "too early"),
        (lambda answer: b"", "too early"),
        (lambda answer: (1 << 30).to_bytes(4, "big") + answer, "a message has 1073741824 bytes"),
    ],
)
def test_what_was_cut_off_or_has_changed_is_refused(
    server: Server, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(TierUnavailable, match=message):
        fetched(Proxy(server.port, change).port)


def test_who_has_another_token_gets_nothing(server: Server) -> None:
    with pytest.raises(TierUnavailable, match="too early"):
        fetched(server.port, token=b"of another start")
    assert fetched(server.port) == FILE


def test_what_was_overheard_cannot_be_sent_again(server: Server) -> None:
    overheard: list[bytes] = []

    def listen(answer: bytes) -> bytes:
        overheard.append(answer)
        return answer

    assert fetched(Proxy(server.port, listen).port) == FILE
    with pytest.raises(TierUnavailable, match="another token"):
        fetched(Proxy(server.port, lambda answer: overheard[0]).port)


def test_strangers_are_refused_and_cost_nothing(server: Server) -> None:
    for words in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 100, b""):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(LIMIT)
            found = b""
            with contextlib.suppress(OSError):
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
                while piece := stranger.recv(1000):
                    found += piece
            assert len(found) <= len(wire._MAGIC) + 32
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    assert fetched(server.port) == FILE
    for each in silent:
        each.close()


def test_who_sends_a_little_at_a_time_has_no_longer_than_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else eight such connections keep the port from the nodes of the run for ever."""
    monkeypatch.setattr(wire, "PATIENCE", 0.4)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(bytes(32) + (4000).to_bytes(4, "big"))
        stranger.settimeout(0.1)
        while time.monotonic() < began + LIMIT:
            with contextlib.suppress(TimeoutError):
                if not stranger.recv(1000):
                    break
            stranger.sendall(b"x")
    assert time.monotonic() - began < LIMIT / 2
    monkeypatch.setattr(wire, "PATIENCE", LIMIT)
    assert fetched(server.port) == FILE


def test_a_server_that_cannot_accept_for_a_while_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have as many files open as it is allowed."""
    failures = iter([OSError(errno.EMFILE, "too many open files"), ConnectionAbortedError()])

    class Listening:
        def __init__(self) -> None:
            self._socket = serving_listen()

        def accept(self) -> Any:
            if (failure := next(failures, None)) is not None:
                raise failure
            return self._socket.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

    serving_listen = serving._listen
    monkeypatch.setattr(serving, "_listen", Listening)
    server = Server(TOKEN, 3, find)
    assert fetched(server.port) == FILE
    server.close()
    until_ended(server._thread)


def test_a_server_that_has_no_thread_for_a_client_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([RuntimeError("can't start new thread")])
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    with pytest.raises(TierUnavailable):
        fetched(server.port)
    assert fetched(server.port) == FILE


def test_what_is_no_server_of_this_run_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def greet() -> None:
            client, _ = other.accept()
            with client:
                client.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(TierUnavailable, match="no peer of this run"):
            fetched(port)
        thread.join()
    with pytest.raises(TierUnavailable, match=f"127.0.0.1 port {port}"):
        fetched(port)


def test_a_client_tries_all_addresses_of_a_node(server: Server) -> None:
    other = Server(TOKEN, 7, find)
    client = Client(
        TOKEN, {3: Address(("no such host.", "127.0.0.1"), server.port), 4: Address(("127.0.0.1",), other.port)}
    )
    assert [b"".join(client.read(REQUEST)) for _ in range(2)] == [FILE, FILE]
    with pytest.raises(TierUnavailable, match=r"the node of rank 4 does not answer .*the node of rank 7"):
        b"".join(client.read(Request(4, "", "checkpoint-1", "model.bin")))
    with pytest.raises(TierUnavailable, match="opened no port"):
        b"".join(client.read(Request(5, "", "checkpoint-1", "model.bin")))
    other.close()


def test_a_server_that_closes_ends_its_connections(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.recv(1)
        server.close()
        client.settimeout(LIMIT)
        with contextlib.suppress(ConnectionError):
            while client.recv(100):
                pass
    for each in threading.enumerate():
        if each.name == serving.THREAD_NAME:
            until_ended(each)
    with pytest.raises(TierUnavailable):
        fetched(server.port if server._listening.fileno() >= 0 else 1)


def test_addresses_are_those_that_the_user_has_chosen_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def __init__(self, address: str, family: Any = socket.AF_INET) -> None:
            self.address, self.family = address, family

    interfaces = {
        "lo": [Found("127.0.0.1"), Found("::1", socket.AF_INET6)],
        "docker0": [Found("172.17.0.1"), Found("02:42", socket.AF_PACKET)],
        "ib0": [Found("10.9.0.1"), Found("fe80::1%ib0", socket.AF_INET6)],
    }
    monkeypatch.setattr(serving.psutil, "net_if_addrs", lambda: interfaces)
    found = serving.own_addresses({"GLOO_SOCKET_IFNAME": "ib0", "MASTER_ADDR": "127.0.0.1"})
    assert found == ("10.9.0.1", "127.0.0.1", "172.17.0.1", "::1")
    assert serving.own_addresses({"MASTER_ADDR": "no such host."}) == ("172.17.0.1", "10.9.0.1", "127.0.0.1", "::1")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_machine_with_ipv6_is_reached_by_it(server: Server) -> None:
    assert b"".join(ask(("::1", server.port), TOKEN, REQUEST)) == FILE


def test_a_machine_without_ipv6_has_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    server = Server(TOKEN, 3, find)
    assert fetched(server.port) == FILE
    server.close()
