"""Files of every kind the command line reads, small and sound, and ways to spoil them."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.plan.serialize import to_json
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.plan.report_plans import measured_run, sliced_plan

PLAN = sliced_plan()
PROFILE = analytic_profile(
    ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=2, vocab_size=384), CPU
)
SOUND: dict[str, Any] = {
    "plan": json.loads(to_json(PLAN)),
    "measured": json.loads(measured_run(PLAN).to_json()),
    "profile": json.loads(PROFILE.to_json()),
    "costs": json.loads(PROFILE.costs([2, 2]).to_json()),
}
"""Documents by their kind."""


def spoiled(kind: str, *path: Any, to: Any = ...) -> str:
    """A document with one value in the place of another, or without it; a plan's digest fits what comes out."""
    document = copy.deepcopy(SOUND[kind])
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return signed(document) if kind == "plan" else json.dumps(document)


def signed(document: dict[str, Any]) -> str:
    """A plan's document with a digest that fits."""
    body = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps(body | {"digest": hashlib.sha256(text.encode()).hexdigest()})


def written(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return str(path)


def exit_code(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def error_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line that a command ends in which must fail, without its prefix."""
    code = exit_code(argv)
    out, err = capsys.readouterr()
    _, prefix, message = err.rpartition(": error: ")  # on a slow machine lines of progress come before it
    assert (code, out, bool(prefix), message.find("\n")) == (2, "", True, len(message) - 1), err
    return message[:-1]
