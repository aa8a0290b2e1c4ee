"""Rendezvous of the nodes of a run before torchrun starts, so that a node that does not start is named within minutes.

torchrun itself would wait longer and end in a traceback on every node that is up. Nodes authenticate each other by a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import stat
import sys
import time
from pathlib import Path

from megatron_epp.launch.gather import PROOF_S, Gathering, listening
from megatron_epp.launch.handshake import Hello, hello, new_nonce, read_answer, read_greeting, receive_line
from megatron_epp.launch.machine import PortError, usable_port
from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)

WAIT_S = 300
_PAUSE_S = 0.5
_MOST_LISTED = 16
TOKEN_VARIABLE = "EPP_RENDEZVOUS_TOKEN"
"""Variable that the launch script of the nodes sets; scripts/train.sbatch makes a token for every job."""
_LEAST_CHARACTERS = 16
_REMEDY = f"set {TOKEN_VARIABLE} to the same {_LEAST_CHARACTERS} or more random characters on every node"


class AbsentError(EppError):
    """A node did not start in time."""


class TokenError(EppError):
    """There is no token, or other users may know it."""


def wait_for_nodes(
    nodes: int, node_rank: int, address: str, port: int, wait_s: float = WAIT_S, token: bytes | None = None
) -> None:
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
    if _is_loopback(address):
        logger.warning(
            "%s is an address of this machine alone: nodes on other machines wait in vain unless MASTER_ADDR, or "
            "launch.master_addr, is that of the first node",
            address,
        )
    if node_rank == 0:
        _admit(nodes, address, port, wait_s, deadline_s, token)
    else:
        _report(Hello(node_rank, nodes, new_nonce()), address, port, wait_s, deadline_s, token)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _admit(nodes: int, address: str, port: int, wait_s: float, deadline_s: float, token: bytes) -> None:
    """Wait for the other nodes as the first one, and tell them whether all have started."""
    try:
        with listening(address, port, nodes) as servers:
            text = asyncio.run(_gather(Gathering(nodes, token), servers, nodes, wait_s, deadline_s))
    except OSError as error:
        raise PortError(port, error) from error
    if text:
        raise AbsentError(text)


async def _gather(gathering: Gathering, servers: list[socket.socket], nodes: int, wait_s: float, deadline_s: float) -> str:
    """Wait for nodes and answer them; return the answer, which is empty if all have started."""
    absent, text = await gathering.wait(servers, deadline_s - time.monotonic()), ""
    if absent:
        more = f" and {len(absent) - _MOST_LISTED} more" if len(absent) > _MOST_LISTED else ""
        text = (
            f"node {', '.join(map(str, absent[:_MOST_LISTED]))}{more} of {nodes} did not come up within {wait_s:g} s: "
            "see its log; launch.wait_seconds (WAIT_SECONDS) sets how long to wait"
        )
        if gathering.num_refused:
            text += f". {gathering.num_refused} calls came without this run's token: {_REMEDY}"
    await gathering.answer(text)
    return text


def _report(own: Hello, address: str, port: int, wait_s: float, deadline_s: float, token: bytes) -> None:
    """Call the first node until it answers, and raise if it refuses or does not."""
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
        raise ConnectionError("the program that listens there is not a node of a run")
    first.sendall(f"{hello(token, nonce, own)}\n".encode())
    try:
        line = receive_line(first, deadline_s + PROOF_S)  # the first node gives up first, and says why
    except ConnectionError as error:
        raise ConnectionError(f"it closes the connection, as a node with another token does: {_REMEDY}") from error
    text = read_answer(token, own.nonce, line)
    if text is None:
        raise ConnectionError(f"it has another token: {_REMEDY}")
    return text


def shared_token() -> bytes:
    """Return the token in the environment, or the user's own in a file of the home folder, which nodes usually share.

    The file is made by the first node that needs it.

    Raises:
        TokenError: the token is short, or the file cannot be used or is accessible to other users.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is not None:
        if len(given) < _LEAST_CHARACTERS:
            raise TokenError(f"{TOKEN_VARIABLE} has {len(given)} characters: {_REMEDY}")
        return given.encode(errors="surrogateescape")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "megatron-epp")
    path = folder / "rendezvous-token"
    try:
        _make_token(path)
        return _read_token(path)
    except OSError as error:
        raise TokenError(f"nodes need a shared token, and {path} cannot be used ({error.strerror}): {_REMEDY}") from error


def _make_token(path: Path) -> None:
    """Make the file atomically if there is none: other nodes may do the same concurrently."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()


def _read_token(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        about, token = os.fstat(file.fileno()), file.read(1024).strip()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise TokenError(f"{path} may be known to others: delete it on every node, a new one is made; or {_REMEDY}")
    if len(token) < _LEAST_CHARACTERS:
        raise TokenError(f"{path} holds {len(token)} characters: delete it, a new one is made; or {_REMEDY}")
    return token


def main() -> None:
    """Serve launch scripts: `python -m megatron_epp.launch.rendezvous NODES NODE_RANK ADDRESS PORT [SECONDS]`."""
    parser = argparse.ArgumentParser(prog="megatron_epp.launch.rendezvous", description=main.__doc__)
    for name in ("nodes", "node_rank"):
        parser.add_argument(name, type=int)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("seconds", type=float, nargs="?", default=WAIT_S)
    given = parser.parse_args()
    try:
        wait_for_nodes(given.nodes, given.node_rank, given.address, given.port, given.seconds)
    except EppError as error:
        sys.exit(f"megatron-epp: error: {error}")


if __name__ == "__main__":
    main()
