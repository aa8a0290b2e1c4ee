"""Functions of torch and of kernels' libraries that are called exist in every release from the oldest supported one on.

The parameters are those of published releases, as `scripts/write_signatures.py` has recorded them.
"""

import ast
import inspect
import json
import re
import types
from dataclasses import replace

import pytest
import torch

from megatron_epp.features.cascade import tree_cascade
from megatron_epp.features.cascade.tree_cascade import cascaded
from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION, AttentionCase, flash
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.links import nccl, objects
from megatron_epp.tools.cli.doctor import _TORCH
from scripts.write_signatures import TORCH_FILE as FILE
from scripts.write_signatures import Call, calls, trees
from tests.support.mcore import mamba_stand_in
from tests.support.runtime.attention_libraries import install, lengths_of, releases_of
from tests.support.runtime.signatures import SIGNATURES, signature

TABLE = SegmentTable.build(Chunk((Segment(0, 5, 8), Segment(1, 0, 2))), 5)
Q = torch.randn(5, 2, 8)
K, V = torch.randn(2, 10, 2, 8).unbind()
FIRST = {"transformer-engine": "2.0", "flash-attn": "2.7.0", "flash-attn-3": "main"}
"""First release of each library whose functions take our arguments."""
CASES = [(library, release) for library in FIRST for release in releases_of(library)]


@pytest.mark.parametrize(("library", "release"), CASES, ids=lambda text: text)
def test_every_release_is_called_once_for_a_chunk_by_its_names_of_arguments(monkeypatch, library, release):
    kernel, calls = install(monkeypatch, library, release)
    known, case = releases_of(library), AttentionCase("cpu", torch.float32, 16, 4, 2)
    if known.index(release) < known.index(FIRST[library]):
        with pytest.raises(TypeError):  # so the kernel's proof fails, and another kernel is chosen
            kernels._relative_error(kernel, case)
        return
    before = torch.get_rng_state()
    assert kernels._relative_error(kernel, case) < 1e-6
    assert torch.equal(torch.get_rng_state(), before), "hidden dropout would change with the number of attention calls"
    (forward,) = (given for given in calls if not {"dout", "d_o"} & given.keys())
    empty = 29 if library == "transformer-engine" else 0
    most = (64, 192) if empty else (63, 133)  # it chooses cuDNN 9.6 for multiples of 64 only
    assert lengths_of(forward) == ([0, 63, 64, 104, *[104] * empty], [0, 133, 134, 174, *[174] * empty], *most)


@pytest.mark.parametrize(("has_window", "has_sinks"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("library", "release"), [*FIRST.items(), ("flash-attn", "main"), ("transformer-engine", "main")])
def test_a_library_gets_windows_and_serves_sinks(monkeypatch, library, release, has_window, has_sinks):
    kernel, _ = install(monkeypatch, library, release)
    for kv_heads in (2, 1):
        case = AttentionCase("cpu", torch.float32, 16, 4, kv_heads, has_window=has_window, has_sinks=has_sinks)
        assert kernels._relative_error(kernel, case) < 1e-6
    deaf = replace(kernel, forward=lambda q, k, v, table, scale: kernel.forward(q, k, v, replace(table, window=None), scale))
    assert (kernels._relative_error(deaf, case) > kernels._TOLERANCE) == has_window
    if has_sinks:  # which come too late for a backward that has a copy of its own
        late = replace(kernel, log_sums=lambda saved: kernel.log_sums(saved).clone())
        assert kernels._relative_error(late, case) > kernels._TOLERANCE


@pytest.mark.parametrize(("library", "release"), [*FIRST.items(), ("flash-attn", "main"), ("transformer-engine", "main")])
def test_a_library_runs_without_its_mask_on_rows_in_common(monkeypatch, library, release):
    kernel, calls = install(monkeypatch, library, release)
    for kv_heads in (2, 1):
        case = AttentionCase("cpu", torch.float32, 16, 4, kv_heads)
        assert tree_cascade._serves(kernel, case)
        assert kernels._relative_error(cascaded(kernel), case, cascaded(EXACT_ATTENTION), tree_cascade._SAMPLE) < 1e-6
    offsets = [[sorted(set(each)) for each in lengths_of(given)[:2]] for given in calls[:3]]
    assert offsets == [[[0, 33, 34, 74], [0, 38, 39, 79]], [[0, 73], [0, 70]], [[0, 40], [0, 13]]]


def test_a_kernel_that_keeps_its_mask_or_a_log_sum_exp_of_its_own_does_not_run_on_rows_in_common(monkeypatch, caplog):
    kernel, _ = install(monkeypatch, "flash-attn")
    case = AttentionCase("cpu", torch.float32, 16, 4, 2)
    masked = replace(kernel, forward=lambda q, k, v, table, scale: kernel.forward(q, k, v, replace(table, causal=True), scale))
    late = replace(kernel, log_sums=lambda saved: kernel.log_sums(saved).clone())
    whole = replace(kernel, of_heads=lambda saved, own, tokens=slice(None): kernel.of_heads(saved, own))
    for wrong in (masked, late, whole):
        assert not tree_cascade._serves(wrong, case)
    assert caplog.text.count("does not run on rows in common, which are gathered for each segment") == 3


def test_a_store_of_weight_gradients_has_the_methods_that_are_called():
    for name, rows in SIGNATURES["transformer-engine"].items():
        if name.startswith("WeightGradStore."):
            ((releases, names),) = rows
            assert releases[-1] == "main"
            assert names == {"put": ["self", "tensor_list", "func"]}.get(name.partition(".")[2], ["self"])


def test_torchs_own_operators_take_what_they_are_called_with(monkeypatch):
    calls = {}

    def stand_in(name, result):
        schema = getattr(torch.ops.aten, name).default._schema
        names = [f"{'*' * a.kwarg_only}{a.name}{'=' * a.has_default_value()}" for a in schema.arguments]

        def function(*args, **named):
            calls[name] = dict(signature(names).bind(*args, **named).arguments)
            return result

        return function

    forward, backward = (f"_flash_attention_{way}" for way in ("forward", "backward"))
    lse = torch.zeros(2, 5)
    aten = types.SimpleNamespace(**{forward: stand_in(forward, (Q, lse, None)), backward: stand_in(backward, (Q, K, V))})
    monkeypatch.setattr(torch, "ops", types.SimpleNamespace(aten=aten))
    out, saved = flash._torch_forward(Q, K, V, TABLE, 0.25)
    flash._torch_backward(torch.ones_like(out), Q, K, V, out, saved, TABLE, 0.25)
    assert calls[forward]["is_causal"] is calls[backward]["is_causal"] is True
    assert calls[forward]["return_debug_mask"] is False
    assert calls[backward]["logsumexp"] is lse
    assert calls[forward]["scale"] == calls[backward]["scale"] == 0.25
    assert calls[forward]["dropout_p"] == calls[backward]["dropout_p"] == 0.0


def test_the_stand_in_for_mambas_kernel_takes_what_every_release_takes():
    names = list(inspect.signature(mamba_stand_in.mamba_split_conv1d_scan_combined).parameters)
    (*_, last), main = SIGNATURES["mamba-ssm"]["mamba_split_conv1d_scan_combined"]
    assert [name.strip("=") for name in last] == names
    assert main == [["main"], [*last, "state_dtype="]]  # which Megatron gives where the kernel has it


RECORD = json.loads(FILE.read_text(encoding="utf-8"))
RELEASES = [release for releases, _ in RECORD["torch.distributed.irecv"] for release in releases]


def parameters_of(name, release):
    return next((names for releases, names in RECORD.get(name, ()) if release in releases), None)


def misfit(call, names):
    by_position = [name.rstrip("=") for name in names if not name.startswith("*")]
    if call.positional > len(by_position):
        return f"{call.positional} arguments, of {len(by_position)}"
    given = {*by_position[: call.positional], *call.keywords}
    if unknown := set(call.keywords) - {name.strip("*=") for name in names}:
        return f"unknown: {', '.join(sorted(unknown))}"
    if twice := set(call.keywords) & set(by_position[: call.positional]):
        return f"twice: {', '.join(sorted(twice))}"
    missing = {name.strip("*") for name in names if not name.endswith("=")} - given if call.is_complete else ()
    return f"missing: {', '.join(sorted(missing))}" if missing else ""


def test_the_record_has_every_release_from_the_oldest_that_is_asked_for_to_the_one_that_runs():
    least, here = (int(re.findall(r"\d+", text)[1]) for text in (_TORCH.least, torch.__version__))
    assert _TORCH.least.startswith("2.")
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


def test_groups_are_made_with_what_every_release_takes(monkeypatch):
    given = {}
    monkeypatch.setattr(objects, "from_each_of_job", lambda mine: [mine])
    create = lambda **named: given.update(named) or "group"  # noqa: E731
    assert objects.Groups(create=create).of((0, 1), "gloo", lambda: "options") == "group"
    call = Call("torch.distributed.new_group", 0, tuple(given), True, "")
    assert [misfit(call, parameters_of(call.name, release)) for release in RELEASES] == [""] * len(RELEASES)


def test_fields_of_a_communicators_options_exist_in_every_release():
    """But `net_name`, which torch's stubs lack and its binding has."""
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
