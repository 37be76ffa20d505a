"""The port by which other nodes read a node's memory, and how they reach it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import psutil

from resume_adapters.core.tiers.wire import Content, Request, answer, ask
from resume_adapters.errors import TierUnavailable

THREAD_NAME = "resume-adapters-peers"
"""How the names of the threads begin."""

_AT_ONCE = 8
"""Clients that a server answers at a time."""

_PAUSE = 0.2
"""Seconds after which a server that cannot accept a client tries again."""

GOODBYE = 2.0
"""Seconds for which the end of a run waits for each thread."""


# ---- The server


class Server:
    """Serves files to who has the token, on a port that the system chooses.

    Args:
        token: of this start.
        holder: this node, by its first rank.
        find: returns a file; raises :class:`CheckpointDamaged` where there is none that can be used.

    Raises:
        OSError: there is no port.
    """

    def __init__(self, token: bytes, holder: int, find: Callable[[Request], Content]) -> None:
        self._token = token
        self._holder = holder
        self._find = find
        self._listening = _listen()
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._is_closing = threading.Event()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port."""
        port: int = self._listening.getsockname()[1]
        return port

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            self._free.acquire()
            try:
                client, _ = self._listening.accept()
            except OSError:  # it is closed, or this process has as many files open as it may
                self._free.release()
                self._is_closing.wait(_PAUSE)
                continue
            thread = threading.Thread(target=self._answer, args=(client,), name=THREAD_NAME, daemon=True)
            self._clients[client] = thread
            try:
                thread.start()
            except RuntimeError:  # the machine has no more threads now; the client comes again
                del self._clients[client]
                client.close()
                self._free.release()
                self._is_closing.wait(_PAUSE)

    def _answer(self, client: socket.socket) -> None:
        with client:
            try:
                # Of a stranger, or a client that is gone: it learns of it by the closed connection.
                with contextlib.suppress(OSError):
                    answer(client, self._token, self._holder, self._find)
            finally:
                self._clients.pop(client, None)
                self._free.release()

    def close(self) -> None:
        """Close the port and all connections."""
        self._is_closing.set()
        _shut(self._listening)
        for client in list(self._clients):
            _shut(client)
        threads = [self._thread, *self._clients.values()]
        for each in threads:
            each.join(GOODBYE)
        self._listening.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def own_addresses(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses by which other nodes may reach this one, the likeliest first.

    Args:
        environment: ``GLOO_SOCKET_IFNAME`` names interfaces, and ``MASTER_ADDR`` is where the training meets.
    """
    by_interface = {
        interface: [
            each.address
            for each in found
            if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80")
        ]
        for interface, found in psutil.net_if_addrs().items()
    }
    chosen = [each.strip() for each in environment.get("GLOO_SOCKET_IFNAME", "").split(",")]
    first = [address for interface in chosen for address in by_interface.get(interface, [])]
    others = [address for found in by_interface.values() for address in found]
    far = [each for each in others if not _is_loopback(each)]
    near = [each for each in others if _is_loopback(each)]
    return tuple(dict.fromkeys([*first, *_on_the_way_to(environment.get("MASTER_ADDR", "")), *far, *near]))


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _on_the_way_to(host: str) -> list[str]:
    """Return the address that this node has on its way to a host; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return [probe.getsockname()[0]]
    return []


# ---- The client


class Address(NamedTuple):
    """Where the server of a node may be reached."""

    hosts: tuple[str, ...]
    port: int


class Client:
    """Reads from the servers of other nodes.

    Args:
        token: of this start.
        addresses: of the servers, by the first rank of their node.
    """

    def __init__(self, token: bytes, addresses: Mapping[int, Address]) -> None:
        self._token = token
        self._addresses = dict(addresses)

    def read(self, request: Request) -> Iterator[bytes]:
        """Yield the content of a file; it can be used once the last piece was yielded.

        Raises:
            CheckpointDamaged: the node has no such file.
            TierUnavailable: it does not answer, or what came was cut off, or has changed on the way.
        """
        hosts, port = self._addresses.get(request.holder, Address((), 0))
        reasons = []
        for host in hosts:
            pieces = ask((host, port), self._token, request)
            try:
                first = next(pieces, b"")
            except TierUnavailable as error:
                reasons.append(error.message)
                continue
            self._addresses[request.holder] = Address((host,), port)
            yield first
            yield from pieces
            return
        raise TierUnavailable(
            f"the node of rank {request.holder} does not answer ({'; '.join(reasons) or 'it has opened no port'}). "
            "Nodes of a run must reach each other on any port, as for gloo; GLOO_SOCKET_IFNAME names the interface"
        )
