"""The first node's side of the rendezvous: it serves all callers concurrently, so that none can block another.

Callers have a few seconds to prove that they are a node of this run, and count as present while they stay connected.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_epp.launch import handshake

logger = logging.getLogger(__name__)
PROOF_S = 10.0
"""Time limit for a caller to identify itself."""
_CLOSE_S = 5.0
"""Time limit for callers to disconnect after the answer: if they close first, the port is not left in TIME_WAIT here."""
_MOST_UNPROVED = 128
"""Largest number of unidentified callers, in addition to one per node; beyond it, the oldest are dropped."""


@contextlib.contextmanager
def listening(address: str, port: int, backlog: int) -> Iterator[list[socket.socket]]:
    """Open sockets that listen on the addresses of this machine that a name resolves to.

    They listen on all interfaces if the name does not determine one: if its addresses are a gateway's, or if it resolves to the
    loopback here, as a machine's own name often does, and to another address on other machines.

    Raises:
        OSError: the port is taken.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(one) for one in _servers(address, port, backlog)]


def _servers(address: str, port: int, backlog: int) -> list[socket.socket]:
    try:
        found = {(entry[0], str(entry[4][0])) for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    inward = {one for one in found if ipaddress.ip_address(one[1].partition("%")[0]).is_loopback}
    is_told = address == "localhost" or any(host == address for _, host in found)
    servers = []
    for family, host in sorted(found if is_told else found - inward):
        try:
            servers.append(socket.create_server((host, port), family=family, backlog=backlog))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                for server in servers:
                    server.close()
                raise
    if servers:
        return servers
    logger.warning("%s is no address of this machine by which others reach it: listening on all interfaces", address)
    return [socket.create_server(("", port), backlog=backlog)]


@dataclass(slots=True, eq=False)
class _Caller:
    """A caller.

    Attributes:
        connection: non-blocking socket.
        address: its remote address.
        until_s: deadline of its proof, a time of `time.monotonic`.
        nonce: the nonce of its greeting.
        received: part of its line received so far.
        hello: its proved identity; None before.
    """

    connection: socket.socket
    address: str
    until_s: float
    nonce: str = field(default_factory=handshake.new_nonce)
    received: bytes = b""
    hello: handshake.Hello | None = None


class Gathering:
    """Wait for the other nodes of a run. Use as a context manager, which disconnects all callers at its end.

    Args:
        servers: listening sockets.
        nodes: number of nodes.
        token: of the run.

    Attributes:
        num_refused: number of callers that did not know the token.
    """

    def __init__(self, servers: Iterable[socket.socket], nodes: int, token: bytes) -> None:
        self._nodes, self._token = nodes, token
        self._selector = selectors.DefaultSelector()
        self._unproved: dict[_Caller, None] = {}
        self._there: dict[int, _Caller] = {}
        self.num_refused = 0
        self._servers = [*servers]
        for server in self._servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *_: object) -> None:
        for caller in [*self._unproved, *self._there.values()]:
            self._drop(caller)
        self._selector.close()

    def wait(self, deadline_s: float) -> list[int]:
        """Wait until all nodes are present or the deadline has passed, and return the missing nodes."""
        while len(self._there) < self._nodes - 1 and (now_s := time.monotonic()) < deadline_s:
            for caller in [caller for caller in self._unproved if caller.until_s <= now_s]:
                self._drop(caller)
            next_s = min([deadline_s, *(caller.until_s for caller in self._unproved)])
            self._attend(next_s - now_s)
        return [rank for rank in range(1, self._nodes) if rank not in self._there]

    def answer(self, text: str) -> None:
        """Tell all present nodes to start (empty text), or the reason why they may not, and wait for them to disconnect.

        Later callers are ignored.
        """
        for server in self._servers:
            self._selector.unregister(server)
        for caller in [*self._unproved]:
            self._drop(caller)
        for caller in [*self._there.values()]:
            self._tell(caller, text)
        until_s = time.monotonic() + _CLOSE_S
        while self._there and (left_s := until_s - time.monotonic()) > 0:
            self._attend(left_s)

    def _attend(self, limit_s: float) -> None:
        """Handle new callers and received data, as soon as there are any or the time limit has passed."""
        for key, _ in self._selector.select(max(limit_s, 0.0)):
            if isinstance(key.data, _Caller):
                self._hear(key.data)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, address = server.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        caller = _Caller(connection, str(address[0]), time.monotonic() + PROOF_S)
        if len(self._unproved) >= _MOST_UNPROVED + self._nodes:
            self._drop(next(iter(self._unproved)))
        self._unproved[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._say(caller, handshake.greeting(caller.nonce))

    def _hear(self, caller: _Caller) -> None:
        try:
            more = caller.connection.recv(handshake.MOST_BYTES + 1 - len(caller.received))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        caller.received += more
        is_line = caller.received.endswith(b"\n")
        if not more or caller.hello is not None or len(caller.received) > handshake.MOST_BYTES:
            self._drop(caller)
        elif is_line:
            self._admit(caller)

    def _admit(self, caller: _Caller) -> None:
        """Admit a caller as the node that it proves to be, or tell it the reason for refusal."""
        found = handshake.read_hello(self._token, caller.nonce, handshake.decoded(caller.received))
        if found is None:
            self.num_refused += 1
            logger.warning("a caller from %s does not know this run's token", caller.address)
            self._drop(caller)
            return
        caller.hello = found
        del self._unproved[caller]
        reason = self._objection(found)
        if reason:
            self._tell(caller, reason)
            self._drop(caller)
        else:
            self._there[found.node_rank] = caller

    def _objection(self, found: handshake.Hello) -> str:
        rank = found.node_rank
        if found.nodes != self._nodes:
            return f"node {rank} was started for {found.nodes} nodes, node 0 for {self._nodes}: give all the same NNODES"
        if not 0 < rank < self._nodes:
            return f"node {rank} is none of {self._nodes} beside node 0: set NODE_RANK from 1 to {self._nodes - 1}"
        if (other := self._there.get(rank)) is not None:
            return f"node {rank} is here already, from {other.address}: give every node a NODE_RANK of its own"
        return ""

    def _tell(self, caller: _Caller, text: str) -> None:
        assert caller.hello is not None
        self._say(caller, handshake.answer(self._token, caller.hello.nonce, text))

    def _say(self, caller: _Caller, line: str) -> None:
        try:
            caller.connection.sendall(f"{line}\n".encode())
        except OSError:
            self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._unproved.pop(caller, None)
        if caller.hello is not None and self._there.get(caller.hello.node_rank) is caller:
            del self._there[caller.hello.node_rank]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.connection)
        caller.connection.close()
