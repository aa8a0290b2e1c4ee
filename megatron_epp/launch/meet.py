"""Nodes of a run wait for each other before torchrun starts, so that one that does not come up is named within minutes.

torchrun itself would wait longer and end in a traceback on every node that is up.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time

from megatron_epp.schedule.errors import EppError

WAIT_S = 300
_HELLO, _GO = "megatron-epp node", "go"
_PAUSE_S = 0.5


class AbsentError(EppError):
    """A node did not come up in time."""


class PortError(EppError):
    """A port to listen on is taken."""


def usable_port(port: int) -> int:
    """The port, or a free one for 0. Raises PortError where nobody may listen on it here."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise PortError(
                f"port {port} cannot be used here ({error.strerror}): set MASTER_PORT or launch.master_port to another, or "
                "leave it out on a single node for a free one"
            ) from error
        return int(probe.getsockname()[1])


def meet(nodes: int, node_rank: int, address: str, port: int, wait_s: float = WAIT_S) -> None:
    """Return when all nodes have called this. The port is free again then.

    Args:
        nodes: in all.
        node_rank: of this one.
        address, port: where the first one listens, for this and then for torchrun.
        wait_s: how long to wait for the others.

    Raises:
        AbsentError: a node, or the first one, did not come up. All that did are told.
        PortError: the port is taken on the first node.
    """
    deadline_s = time.monotonic() + wait_s
    if node_rank == 0:
        usable_port(port)
    if nodes > 1 and node_rank == 0:
        _gather(nodes, port, wait_s, deadline_s)
    elif nodes > 1:
        _report(node_rank, address, port, wait_s, deadline_s)


def _gather(nodes: int, port: int, wait_s: float, deadline_s: float) -> None:
    there: dict[int, socket.socket] = {}
    with socket.create_server(("", port)) as server:
        while len(there) < nodes - 1 and (left_s := deadline_s - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                caller, _ = server.accept()
            except TimeoutError:
                break
            caller.settimeout(5.0)
            who = _line(caller).removeprefix(_HELLO).strip()
            if who.isdecimal() and 0 < int(who) < nodes:
                there[int(who)] = caller
            else:
                caller.close()
    absent = sorted(set(range(1, nodes)) - set(there))
    text = (
        f"node {', '.join(map(str, absent))} of {nodes} did not come up within {wait_s:g} s: see its log; launch.wait_seconds "
        "(WAIT_SECONDS) sets how long to wait"
    )
    for caller in there.values():
        caller.sendall(f"{text if absent else _GO}\n".encode())
        _line(caller)  # the caller closes first, and so keeps the port from lingering here
        caller.close()
    if absent:
        raise AbsentError(text)


def _report(node_rank: int, address: str, port: int, wait_s: float, deadline_s: float) -> None:
    reason = ""
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, port), timeout=min(left_s, 10.0)) as first:
                first.sendall(f"{_HELLO} {node_rank}\n".encode())
                first.settimeout(left_s + 10.0)  # the first node gives up first, and says why
                answer = _line(first)
        except OSError as error:
            reason = f" ({error})"
            time.sleep(_PAUSE_S)
            continue
        if answer == _GO:
            return
        if answer:
            raise AbsentError(answer)
    raise AbsentError(
        f"node 0 does not answer at {address}:{port} within {wait_s:g} s{reason}: see its log, check MASTER_ADDR and "
        "MASTER_PORT; launch.wait_seconds (WAIT_SECONDS) sets how long to wait"
    )


def _line(other: socket.socket) -> str:
    """A line of text; what there is when the other end closes or says no more."""
    found = b""
    try:
        while not found.endswith(b"\n") and (more := other.recv(1024)):
            found += more
    except OSError:
        pass
    return found.decode(errors="replace").strip()


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
