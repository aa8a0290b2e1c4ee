"""Transfer of a refusal's text from a rank to its launcher, by the error file that torchrun gives each process.

torchrun itself prints that file's text as the traceback of the rank, in the table at the end of its output.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_epp.launch.lifetime import FOLDER_VARIABLE

FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file."""
_KEY, _CODE = "megatron_epp", "exit_code"


def hand_over(text: str, exit_code: int) -> bool:
    """Write a refusal for the launcher. Return True if the launcher is this package's own, which repeats it at the end.

    Args:
        exit_code: with which the launcher is to end.
    """
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return False
    about = {"py_callstack": text, "timestamp": str(int(time.time())), _KEY: True, _CODE: exit_code}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": about}}, file)
    except OSError:
        return False
    return FOLDER_VARIABLE in os.environ


class Refusal(NamedTuple):
    """Refusal of a rank: its text, and the exit code for its launcher."""

    text: str
    exit_code: int


def handed_over(message: str | Mapping[str, Any]) -> Refusal | None:
    """Return the refusal from the message of torchrun's `ProcessFailure`; None if the rank failed otherwise."""
    if isinstance(message, str) or not (about := message.get("extraInfo", {})).get(_KEY):
        return None
    return Refusal(str(message["message"]), int(about.get(_CODE, 1)))
