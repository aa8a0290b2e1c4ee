"""The first node's side of a meeting: it hears all callers at once, so that none can keep it from another.

Callers have a few seconds to prove that they are a node of this run, and hold their place as long as they stay connected.
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
"""The time that a caller has to say who it is."""
_CLOSE_S = 5.0
"""The time that callers have to hang up first, once they are answered: the port then does not linger here."""
_MOST_UNPROVED = 128
"""The number of callers, beside one per node, that may be yet to say who they are; of more, the oldest are dropped."""


@contextlib.contextmanager
def listening(address: str, port: int, backlog: int) -> Iterator[list[socket.socket]]:
    """Sockets that listen on the addresses of this machine that a name stands for.

    They listen on all interfaces where the name does not tell: where its addresses are a gateway's, or where it stands for the
    loopback here, as a machine's own name often does, and for something else on other machines.

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
    """Who has called.

    Attributes:
        connection: to it, which does not block.
        address: where it called from.
        until_s: when its proof must be there, as `time.monotonic` counts.
        nonce: that it was greeted with.
        received: of its line.
        hello: what it has proved; None before.
    """

    connection: socket.socket
    address: str
    until_s: float
    nonce: str = field(default_factory=handshake.new_nonce)
    received: bytes = b""
    hello: handshake.Hello | None = None


class Gathering:
    """Waits for the other nodes of a run. Use as a context manager, which hangs up on all callers at its end.

    Args:
        servers: that listen.
        nodes: in all.
        token: of the run.

    Attributes:
        num_refused: callers that did not know the token.
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
        """The nodes that are not there when all are, or at the deadline."""
        while len(self._there) < self._nodes - 1 and (now_s := time.monotonic()) < deadline_s:
            for caller in [caller for caller in self._unproved if caller.until_s <= now_s]:
                self._drop(caller)
            next_s = min([deadline_s, *(caller.until_s for caller in self._unproved)])
            self._attend(next_s - now_s)
        return [rank for rank in range(1, self._nodes) if rank not in self._there]

    def answer(self, text: str) -> None:
        """Tell all that are there to go, with an empty text, or why they may not, and let them hang up.

        Those who call from now on are not heard.
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
        """Hear whoever calls or says something, as soon as somebody does."""
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
        """Give a caller the place that it proves to be its own, or say why not."""
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
