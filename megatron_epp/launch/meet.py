"""Rendezvous of the nodes of a run before torchrun starts, so that a node that does not start is named within minutes.

torchrun itself would wait longer and end in a traceback on every node that is up.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time

from megatron_epp.launch.gather import PROOF_S, Gathering, listening
from megatron_epp.launch.handshake import Hello, hello, new_nonce, read_answer, read_greeting, receive_line
from megatron_epp.launch.meet_token import TOKEN_REMEDY, shared_token
from megatron_epp.plan.errors import EppError

WAIT_S = 300
_PAUSE_S = 0.5
_MOST_LISTED = 16


class AbsentError(EppError):
    """A node did not start in time."""


class PortError(EppError):
    """A port to listen on is taken."""


def usable_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises PortError if it cannot be listened on here."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise _port_error(port, error) from error
        return int(probe.getsockname()[1])


def _port_error(port: int, error: OSError) -> PortError:
    return PortError(
        f"port {port} cannot be used here ({error.strerror}): set MASTER_PORT or launch.master_port to another, or leave it "
        "out on a single node for a free one"
    )


def meet(nodes: int, node_rank: int, address: str, port: int, wait_s: float = WAIT_S, token: bytes | None = None) -> None:
    """Return when all nodes have called this. The port is free again then.

    Args:
        nodes: number of nodes.
        node_rank: of this node.
        address, port: address on which the first node listens, for this and then for torchrun.
        wait_s: time limit for the other nodes.
        token: by which nodes authenticate each other; None: `shared_token`.

    Raises:
        AbsentError: a node, or the first one, did not start, or this one has the node rank of another. All nodes that started
            are told.
        PortError: the port is taken on the first node.
        TokenError: there is no token.
    """
    deadline_s = time.monotonic() + wait_s
    if node_rank == 0:
        usable_port(port)
    if nodes <= 1:
        return
    token = shared_token() if token is None else token
    if node_rank == 0:
        _gather(nodes, address, port, wait_s, deadline_s, token)
    else:
        _report(Hello(node_rank, nodes, new_nonce()), address, port, wait_s, deadline_s, token)


def _gather(nodes: int, address: str, port: int, wait_s: float, deadline_s: float, token: bytes) -> None:
    try:
        with listening(address, port, nodes + 128) as servers, Gathering(servers, nodes, token) as gathering:
            absent = gathering.wait(deadline_s)
            text = ""
            if absent:
                text = (
                    f"node {_listed(absent)} of {nodes} did not come up within {wait_s:g} s: see its log; "
                    "launch.wait_seconds (WAIT_SECONDS) sets how long to wait"
                )
                if gathering.num_refused:
                    text += f". {gathering.num_refused} calls came without this run's token: {TOKEN_REMEDY}"
            gathering.answer(text)
    except OSError as error:
        raise _port_error(port, error) from error
    if text:
        raise AbsentError(text)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else ""
    return ", ".join(map(str, ranks[:_MOST_LISTED])) + more


def _report(own: Hello, address: str, port: int, wait_s: float, deadline_s: float, token: bytes) -> None:
    reason = ""
    while (now_s := time.monotonic()) < deadline_s:
        try:
            with socket.create_connection((address, port), timeout=min(deadline_s - now_s, 10.0)) as first:
                text = _asked(first, own, deadline_s, token)
        except OSError as error:
            reason = f" ({error})"
            time.sleep(_PAUSE_S)
            continue
        if text:
            raise AbsentError(text)
        return
    raise AbsentError(
        f"node 0 does not answer at {address}:{port} within {wait_s:g} s{reason}: see its log, check MASTER_ADDR and "
        "MASTER_PORT; launch.wait_seconds (WAIT_SECONDS) sets how long to wait"
    )


def _asked(first: socket.socket, own: Hello, deadline_s: float, token: bytes) -> str:
    """Answer of the first node to this one: empty if it may start, otherwise the reason.

    Raises:
        OSError: the listener does not prove to be a node of this run, or does not answer.
    """
    nonce = read_greeting(receive_line(first, min(deadline_s, time.monotonic() + PROOF_S)))
    if nonce is None:
        raise ConnectionError("what listens there is no node")
    first.sendall(f"{hello(token, nonce, own)}\n".encode())
    try:
        line = receive_line(first, deadline_s + PROOF_S)  # the first node gives up first, and says why
    except ConnectionError as error:
        raise ConnectionError(f"it hangs up, as one does that has another token: {TOKEN_REMEDY}") from error
    text = read_answer(token, own.nonce, line)
    if text is None:
        raise ConnectionError(f"it has another token: {TOKEN_REMEDY}")
    return text


def main() -> None:
    """For launch scripts: `python -m megatron_epp.launch.meet NODES NODE_RANK ADDRESS PORT [SECONDS]`."""
    parser = argparse.ArgumentParser(prog="megatron_epp.launch.meet", description=main.__doc__)
    for name in ("nodes", "node_rank"):
        parser.add_argument(name, type=int)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("seconds", type=float, nargs="?", default=WAIT_S)
    given = parser.parse_args()
    try:
        meet(given.nodes, given.node_rank, given.address, given.port, given.seconds)
    except EppError as error:
        sys.exit(f"megatron-epp: error: {error}")


if __name__ == "__main__":
    main()
