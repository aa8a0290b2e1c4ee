"""What functions of libraries take, by release."""

import json
from inspect import Parameter, Signature

from scripts import write_signatures

SIGNATURES = json.loads(write_signatures.FILE.read_text(encoding="utf-8"))
"""By library and function: pairs of releases and parameters (`scripts/write_signatures.py`)."""


def signature(names):
    kinds, defaults = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY), (Parameter.empty, None)
    return Signature([Parameter(name.strip("*="), kinds[name[0] == "*"], default=defaults[name[-1] == "="]) for name in names])
