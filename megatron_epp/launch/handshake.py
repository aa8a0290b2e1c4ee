"""The lines by which nodes of a run prove to each other that they know its token, without sending it.

The first node greets with a nonce. A caller answers with its node rank, a nonce of its own, and a proof: an HMAC of all of
these under the token. The first node's answer has a proof over the caller's nonce, so neither side accepts a stranger or a
replay.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass

_GREETING, _HELLO, _ANSWER = "megatron-epp-rendezvous", "node", "answer"
MOST_BYTES = 1024
"""Largest size of a line. Nodes of a run send no longer ones."""
_LEAST_NONCE = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """Identity that a node sends, with the number of nodes that is set there."""

    node_rank: int
    nodes: int
    nonce: str


def new_nonce() -> str:
    """Return a random text that was never sent before."""
    return secrets.token_hex(16)


def greeting(nonce: str) -> str:
    """First line of the first node."""
    return f"{_GREETING} {nonce}"


def read_greeting(line: str) -> str | None:
    """Return the nonce of a greeting; None if the line is not a greeting."""
    words = line.split(" ")
    return words[1] if len(words) == 2 and words[0] == _GREETING and len(words[1]) >= _LEAST_NONCE else None


def hello(token: bytes, nonce: str, own: Hello) -> str:
    """Line that answers a greeting with this nonce."""
    facts = f"{own.node_rank} {own.nodes} {own.nonce}"
    return f"{_HELLO} {facts} {_proof(token, _HELLO, nonce, facts)}"


def read_hello(token: bytes, nonce: str, line: str) -> Hello | None:
    """Return the identity of the node that answers a greeting with this nonce; None if it does not know the token."""
    words = line.split(" ")
    if len(words) != 5 or words[0] != _HELLO or not all(map(str.isdecimal, words[1:3])) or len(words[3]) < _LEAST_NONCE:
        return None
    if not hmac.compare_digest(words[4].encode(), _proof(token, _HELLO, nonce, " ".join(words[1:4])).encode()):
        return None
    return Hello(int(words[1]), int(words[2]), words[3])


def answer(token: bytes, nonce: str, text: str) -> str:
    """Line that tells the node of this nonce to start (empty text), or the reason why it may not."""
    return f"{_ANSWER} {_proof(token, _ANSWER, nonce, text)} {text}"


def read_answer(token: bytes, nonce: str, line: str) -> str | None:
    """Return the text of an answer to the node of this nonce; None if the sender does not know the token."""
    kind, _, rest = line.partition(" ")
    proof, _, text = rest.partition(" ")
    is_proved = kind == _ANSWER and hmac.compare_digest(proof.encode(), _proof(token, _ANSWER, nonce, text).encode())
    return text if is_proved else None


def receive_line(other: socket.socket, until_s: float) -> str:
    """Receive a line that must be complete by a time of `time.monotonic`, in any number of parts.

    Raises:
        OSError: it is not complete by then, or is longer than `MOST_BYTES`, or the other end closes first.
    """
    found = b""
    while not found.endswith(b"\n"):
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        other.settimeout(left_s)
        if not (more := other.recv(MOST_BYTES + 1 - len(found))):
            raise ConnectionError("the connection is closed")
        found += more
        if len(found) > MOST_BYTES:
            raise ConnectionError("the line is too long")
    return decoded(found)


def decoded(line: bytes) -> str:
    """Decode a received line, which may be malformed."""
    return line.decode("ascii", errors="replace").removesuffix("\n")


def _proof(token: bytes, kind: str, nonce: str, text: str) -> str:
    return hmac.new(token, f"{kind} {nonce} {text}".encode(), hashlib.sha256).hexdigest()
