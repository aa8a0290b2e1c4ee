"""What functions of libraries take, by release."""

import inspect
import json

from scripts import write_signatures

SIGNATURES = json.loads(write_signatures.FILE.read_text(encoding="utf-8"))
"""By library and function: pairs of releases and parameters (`scripts/write_signatures.py`)."""


def signature(names):
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return inspect.Signature(
        [
            inspect.Parameter(
                name.strip("*="), kinds[name.startswith("*")], default=None if name.endswith("=") else inspect.Parameter.empty
            )
            for name in names
        ]
    )
