"""The lines by which nodes of a run prove to each other that they know its token, without saying it.

The first node greets with a nonce. A caller answers with its place, a nonce of its own, and a proof: an HMAC of all of these
under the token. The first node's answer has a proof over the caller's nonce, so neither side believes a stranger or a replay.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass

_GREETING, _HELLO, _ANSWER = "megatron-epp-meet", "node", "answer"
MOST_BYTES = 1024
"""The longest line. Nodes of a run send no longer ones."""
_LEAST_NONCE = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself.

    Attributes:
        node_rank: its own.
        nodes: in all, as it was told.
        nonce: of its own.
    """

    node_rank: int
    nodes: int
    nonce: str


def new_nonce() -> str:
    """Text that has never been sent before."""
    return secrets.token_hex(16)


def greeting(nonce: str) -> str:
    """The first node's first line."""
    return f"{_GREETING} {nonce}"


def read_greeting(line: str) -> str | None:
    """The nonce of a greeting; None where the line is none."""
    words = line.split(" ")
    return words[1] if len(words) == 2 and words[0] == _GREETING and len(words[1]) >= _LEAST_NONCE else None


def hello(token: bytes, nonce: str, own: Hello) -> str:
    """The line that answers a greeting with this nonce."""
    facts = f"{own.node_rank} {own.nodes} {own.nonce}"
    return f"{_HELLO} {facts} {_proof(token, _HELLO, nonce, facts)}"


def read_hello(token: bytes, nonce: str, line: str) -> Hello | None:
    """The node that answers a greeting with this nonce; None where it does not know the token."""
    words = line.split(" ")
    if len(words) != 5 or words[0] != _HELLO or not all(map(str.isdecimal, words[1:3])) or len(words[3]) < _LEAST_NONCE:
        return None
    if not hmac.compare_digest(words[4].encode(), _proof(token, _HELLO, nonce, " ".join(words[1:4])).encode()):
        return None
    return Hello(int(words[1]), int(words[2]), words[3])


def answer(token: bytes, nonce: str, text: str) -> str:
    """The line that tells the node of this nonce to go, with an empty text, or why it may not."""
    return f"{_ANSWER} {_proof(token, _ANSWER, nonce, text)} {text}"


def read_answer(token: bytes, nonce: str, line: str) -> str | None:
    """The text of an answer to the node of this nonce; None where who sends it does not know the token."""
    kind, _, rest = line.partition(" ")
    proof, _, text = rest.partition(" ")
    is_proved = kind == _ANSWER and hmac.compare_digest(proof.encode(), _proof(token, _ANSWER, nonce, text).encode())
    return text if is_proved else None


def receive_line(other: socket.socket, until_s: float) -> str:
    """A line that is complete at a time of `time.monotonic`, however it trickles in.

    Raises:
        OSError: it is not complete then, or longer than it may be, or the other end closes first.
    """
    found = b""
    while not found.endswith(b"\n"):
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        other.settimeout(left_s)
        if not (more := other.recv(MOST_BYTES + 1 - len(found))):
            raise ConnectionError("it hangs up")
        found += more
        if len(found) > MOST_BYTES:
            raise ConnectionError("it says too much")
    return decoded(found)


def decoded(line: bytes) -> str:
    """The text of a received line, or of what should be one."""
    return line.decode("ascii", errors="replace").removesuffix("\n")


def _proof(token: bytes, kind: str, nonce: str, text: str) -> str:
    return hmac.new(token, f"{kind} {nonce} {text}".encode(), hashlib.sha256).hexdigest()
