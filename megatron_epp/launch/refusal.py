"""The text of a refusal on its way from a rank to its launcher, in the error file that torchrun names to each process.

torchrun itself prints that file's text as the traceback of the rank, in the table at the end of its output.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from megatron_epp.launch.lifetime import FOLDER_VARIABLE

FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the file."""
_KEY = "megatron_epp"


def hand_over(text: str) -> bool:
    """Write a refusal for the launcher. Return True if the launcher is this package's own, which repeats it at the end."""
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return False
    about = {"py_callstack": text, "timestamp": str(int(time.time())), _KEY: True}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": about}}, file)
    except OSError:
        return False
    return FOLDER_VARIABLE in os.environ


def handed_over(message: str | Mapping[str, Any]) -> str | None:
    """Return the text of a refusal from the message of torchrun's `ProcessFailure`; None if the rank failed otherwise."""
    if isinstance(message, str) or not message.get("extraInfo", {}).get(_KEY):
        return None
    return str(message["message"])
