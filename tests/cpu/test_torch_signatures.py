"""Every argument that is passed to torch's functions of devices, groups, autograd and attention exists in every release.

The parameters are those of torch's published wheels, as `scripts/write_signatures.py` has recorded them.
"""

import ast
import json
import re

import pytest
import torch

from megatron_epp.cli.doctor import _TORCH
from megatron_epp.runtime.links import nccl, objects
from scripts.write_signatures import TORCH_FILE as FILE
from scripts.write_signatures import Call, calls, fields, operator, trees

RECORD = json.loads(FILE.read_text(encoding="utf-8"))
RELEASES = [release for releases, _ in RECORD["torch.distributed.irecv"] for release in releases]


def parameters_of(name, release):
    """Parameters of a function in a release; None if it has no such function."""
    return next((names for releases, names in RECORD.get(name, ()) if release in releases), None)


def misfit(call, names):
    """Why a call does not fit parameters; empty if it does."""
    by_position = [name.rstrip("=") for name in names if not name.startswith("*")]
    if call.positional > len(by_position):
        return f"{call.positional} arguments, of {len(by_position)}"
    given = {*by_position[: call.positional], *call.keywords}
    if unknown := set(call.keywords) - {name.strip("*=") for name in names}:
        return f"unknown: {', '.join(sorted(unknown))}"
    if twice := set(call.keywords) & set(by_position[: call.positional]):
        return f"twice: {', '.join(sorted(twice))}"
    needed = {name.strip("*") for name in names if not name.endswith("=")}
    missing = needed - given if call.is_complete else ()
    return f"missing: {', '.join(sorted(missing))}" if missing else ""


def test_the_record_has_every_release_from_the_oldest_that_is_asked_for_to_the_one_that_runs():
    least, here = (int(re.findall(r"\d+", text)[1]) for text in (_TORCH.requirement, torch.__version__))
    assert _TORCH.requirement.startswith("torch>=2.")
    minors = [int(release.split(".")[1]) for release in RELEASES]
    assert minors[: here - least + 1] == list(range(least, here + 1)), "run scripts/write_signatures.py with newer wheels"


def test_every_call_fits_every_release():
    found = list(calls())
    assert len({call.name for call in found}) > 40
    wrong = []
    for call in found:
        for release in RELEASES:
            names = parameters_of(call.name, release)
            why = "not there, or not recorded" if names is None else misfit(call, names)
            wrong += [f"{call.where}: {call.name} of {release}: {why}"] if why else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (Call("f", 2, ("group",), True, ""), ""),
        (Call("f", 1, (), False, ""), ""),
        (Call("f", 1, ("group",), True, ""), "missing: b"),
        (Call("f", 2, ("grp",), True, ""), "unknown: grp"),
        (Call("f", 2, ("b",), True, ""), "twice: b"),
        (Call("f", 4, (), True, ""), "4 arguments, of 3"),
    ],
)
def test_a_call_that_does_not_fit_is_told(call, why):
    assert misfit(call, ["a", "b", "group=", "*scale="]) == why


def test_groups_are_made_with_what_every_release_takes(monkeypatch):
    given = {}
    monkeypatch.setattr(objects, "from_each_of_job", lambda mine: [mine])
    create = lambda **named: given.update(named) or "group"  # noqa: E731
    assert objects.Groups(create=create).of((0, 1), "gloo", lambda: "options") == "group"
    call = Call("torch.distributed.new_group", 0, tuple(given), True, "")
    assert [misfit(call, parameters_of(call.name, release)) for release in RELEASES] == [""] * len(RELEASES)


def test_fields_of_a_communicators_options_exist_in_every_release():
    """Of those that are set by a name in a table, torch's stubs lack `net_name`, which its binding has."""
    written = {
        target.attr
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "options"
    }
    assert "_timeout" in written
    wanted = written | {"config", "is_high_priority_stream", *nccl._CONFIG} - {"net_name"}
    for release in RELEASES:
        assert wanted <= {name.rpartition(".")[2] for name in parameters_of("options", release)}


TABLE = """
- func: first(Tensor q, float p=0.0, bool causal=False, *, Tensor? mask=None, SymInt[2] size) -> (Tensor, Tensor lse)
- func: first.out(Tensor other, *, Tensor(a!) out) -> Tensor(a!)
"""
STUBS = """
class ProcessGroupNCCL(Backend):
    class Options(Backend.Options):
        config: int
        def __init__(self, flag: bool = False): ...
        @property
        def name(self) -> str: ...
    other: int
"""


def test_operators_and_fields_are_read_from_torchs_files():
    assert operator(TABLE, "first") == ["q", "p=", "causal=", "*mask=", "*size"]
    assert operator(TABLE, "second") is None
    assert fields(STUBS) == ["ProcessGroupNCCL.Options.config", "ProcessGroupNCCL.Options.name"]
