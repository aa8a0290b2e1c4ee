"""The first node's side of the rendezvous: it serves all callers concurrently, so that none can block another.

Callers have a few seconds to prove that they are a node of this run, and count as present while they stay connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    try:
        found = {(entry[0], str(entry[4][0])) for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
    except OSError:
        found = set()
    inward = {one for one in found if ipaddress.ip_address(one[1].partition("%")[0]).is_loopback}
    is_told = address == "localhost" or any(host == address for _, host in found)
    with contextlib.ExitStack() as stack:
        servers = []
        for family, host in sorted(found if is_told else found - inward):
            try:
                servers.append(stack.enter_context(socket.create_server((host, port), family=family, backlog=backlog)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
        if not servers:
            logger.warning("%s is no address of this machine by which others reach it: listening on all interfaces", address)
            servers.append(stack.enter_context(socket.create_server(("", port), backlog=backlog)))
        yield servers


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that is present: its connection, remote address, proved identity, and the task that serves it."""

    writer: asyncio.StreamWriter
    address: str
    hello: handshake.Hello
    task: asyncio.Task[None] | None


class Gathering:
    """Wait for the other nodes of a run. Use it within one `asyncio.run`, which disconnects all callers at its end.

    `num_refused` counts callers that did not know the run's token.
    """

    def __init__(self, nodes: int, token: bytes) -> None:
        self._nodes, self._token = nodes, token
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        self._present: dict[int, _Node] = {}
        self._arrived = asyncio.Event()
        self._listeners: list[asyncio.Server] = []
        self.num_refused = 0

    async def wait(self, servers: Sequence[socket.socket], limit_s: float) -> list[int]:
        """Serve callers of listening sockets until all nodes are present or the time is over, and return the missing nodes."""
        backlog = self._nodes + _MOST_UNPROVED
        for server in servers:
            made = asyncio.start_server(self._serve, sock=server, limit=handshake.MOST_BYTES, backlog=backlog)
            self._listeners.append(await made)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while len(self._present) < self._nodes - 1:
                    self._arrived.clear()
                    await self._arrived.wait()
        return [rank for rank in range(1, self._nodes) if rank not in self._present]

    async def answer(self, text: str) -> None:
        """Tell all present nodes to start (empty text), or the reason why they may not, and wait for them to disconnect.

        Later callers are ignored.
        """
        for listener in self._listeners:
            listener.close()
        for writer in self._unproved:
            writer.close()
        for node in self._present.values():
            self._tell(node.writer, node.hello, text)
        if tasks := [node.task for node in self._present.values() if node.task is not None]:
            await asyncio.wait(tasks, timeout=_CLOSE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Greet a caller, admit it as the node that it proves to be, and wait until it disconnects."""
        self._unproved[writer] = None
        if len(self._unproved) > _MOST_UNPROVED + self._nodes:
            oldest = next(iter(self._unproved))
            del self._unproved[oldest]
            oldest.close()
        address, *_ = writer.get_extra_info("peername") or ("an unknown address",)  # unknown where it has disconnected
        found = None
        try:
            found = await self._proved(reader, writer, address)
            if found is not None:
                if reason := self._objection(found):
                    self._tell(writer, found, reason)
                else:
                    self._present[found.node_rank] = _Node(writer, address, found, asyncio.current_task())
                    self._arrived.set()
                    await reader.read(1)  # nodes send no more: they wait for the answer and disconnect
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it has disconnected, or is no node of this run
        finally:
            self._unproved.pop(writer, None)
            if found is not None and (node := self._present.get(found.node_rank)) is not None and node.writer is writer:
                del self._present[found.node_rank]
            writer.close()

    async def _proved(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> handshake.Hello | None:
        """Return the identity that a caller proves in time; None if it does not know the token."""
        nonce = handshake.new_nonce()
        writer.write(f"{handshake.greeting(nonce)}\n".encode())
        async with asyncio.timeout(PROOF_S):
            line = await reader.readuntil(b"\n")
        found = handshake.read_hello(self._token, nonce, handshake.decoded(line))
        if found is None:
            self.num_refused += 1
            logger.warning("a caller from %s does not know this run's token", address)
        self._unproved.pop(writer, None)
        return found

    def _objection(self, found: handshake.Hello) -> str:
        rank = found.node_rank
        if found.nodes != self._nodes:
            return f"node {rank} was started for {found.nodes} nodes, node 0 for {self._nodes}: give all the same NNODES"
        if not 0 < rank < self._nodes:
            return f"node {rank} is not one of the {self._nodes} nodes: set NODE_RANK from 1 to {self._nodes - 1}"
        if (other := self._present.get(rank)) is not None:
            return f"node {rank} is present already, from {other.address}: give every node a NODE_RANK of its own"
        return ""

    def _tell(self, writer: asyncio.StreamWriter, hello: handshake.Hello, text: str) -> None:
        writer.write(f"{handshake.answer(self._token, hello.nonce, text)}\n".encode())
