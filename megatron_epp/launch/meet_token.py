"""The token that the nodes of a run share to authenticate each other."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from megatron_epp.plan.errors import EppError

TOKEN_VARIABLE = "EPP_MEET_TOKEN"
"""Variable that the launch script of the nodes sets; scripts/train.sbatch makes a token for every job."""
LEAST_CHARACTERS = 16
TOKEN_REMEDY = f"set {TOKEN_VARIABLE} to the same {LEAST_CHARACTERS} or more random characters on every node"


class TokenError(EppError):
    """There is no token, or other users may know it."""


def shared_token() -> bytes:
    """Return the token in the environment, or the user's own in a file of the home folder, which nodes usually share.

    The file is made by the first node that needs it.

    Raises:
        TokenError: the token is short, or the file cannot be used or is accessible to other users.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given is not None:
        if len(given) < LEAST_CHARACTERS:
            raise TokenError(f"{TOKEN_VARIABLE} has {len(given)} characters: {TOKEN_REMEDY}")
        return given.encode(errors="surrogateescape")
    path = _folder() / "meet-token"
    try:
        _make(path)
        return _read(path)
    except OSError as error:
        raise TokenError(f"nodes need a token to meet, and {path} cannot be used ({error.strerror}): {TOKEN_REMEDY}") from error


def _folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "megatron-epp")


def _make(path: Path) -> None:
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


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        about, token = os.fstat(file.fileno()), file.read(1024).strip()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise TokenError(f"{path} may be known to others: delete it on every node, a new one is made; or {TOKEN_REMEDY}")
    if len(token) < LEAST_CHARACTERS:
        raise TokenError(f"{path} holds {len(token)} characters: delete it, a new one is made; or {TOKEN_REMEDY}")
    return token
