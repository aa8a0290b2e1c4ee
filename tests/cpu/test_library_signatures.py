"""Kernels call their libraries by names that every release from the oldest supported one on has."""

import inspect
import types
from pathlib import Path

import pytest
import torch

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.kernels import flash, transformer_engine
from megatron_epp.runtime.attention.segments import SegmentTable
from scripts import write_signatures
from tests.support.mcore import mamba_stand_in
from tests.support.runtime.signatures import SIGNATURES, signature

TABLE = SegmentTable.build(Chunk((Segment(0, 5, 8), Segment(1, 0, 2))), 5)
Q = torch.randn(5, 2, 8)
K, V = torch.randn(2, 10, 2, 8).unbind()
FIRST = {"transformer-engine": "2.0", "flash-attn": "2.7.0", "flash-attn-3": "main"}
"""First release of each library whose functions take our arguments."""


def parameters_of(library, name, release):
    return next(names for releases, names in SIGNATURES[library][name] if release in releases)


def stand_in(library, name, release, calls, result):
    """A function that takes what a release's takes, and notes the arguments by name."""

    def function(*args, **named):
        calls[name] = dict(signature(parameters_of(library, name, release)).bind(*args, **named).arguments)
        return result

    function.__signature__ = signature(parameters_of(library, name, release))
    return function


def releases_of(library):
    name = next(iter(SIGNATURES[library]))
    return [release for releases, _ in SIGNATURES[library][name] for release in releases]


def played(monkeypatch, library, release):
    """Call a library's forward and backward; return the arguments by function, and the saved tensor."""
    calls, lse, module = {}, torch.zeros(2, 5), types.SimpleNamespace()
    for name in SIGNATURES[library]:
        if "." not in name:
            setattr(
                module, name, stand_in(library, name, release, calls, (Q, [lse, lse] if "fused" in name else lse, None, None))
            )
    module.FusedAttnBackend, module.TORCH_DType = {"F16_arbitrary_seqlen": 1}, {"kFloat32": torch.float32}
    place, forward, backward = {
        "transformer-engine": ("_fused", transformer_engine._forward, transformer_engine._backward),
        "flash-attn": ("_flash_attn", flash._package_forward, flash._package_backward),
        "flash-attn-3": ("_flash_attn_3", flash._hopper_forward, flash._hopper_backward),
    }[library]
    monkeypatch.setattr(transformer_engine if library == "transformer-engine" else flash, place, lambda: module)
    out, saved = forward(Q, K, V, TABLE, 0.25)
    backward(torch.ones_like(out), Q, K, V, out, saved, TABLE, 0.25)
    return calls, saved[0]


CASES = [(library, release) for library in FIRST for release in releases_of(library)]


@pytest.mark.parametrize(("library", "release"), CASES, ids=lambda text: text)
def test_forward_and_backward_are_called_by_the_names_of_each_release(monkeypatch, library, release):
    known = releases_of(library)
    if known.index(release) < known.index(FIRST[library]):
        with pytest.raises(TypeError):  # so the kernel's proof fails, and another kernel is chosen
            played(monkeypatch, library, release)
        return
    calls, lse = played(monkeypatch, library, release)
    assert len(calls) == 2
    for name, given in calls.items():
        assert given["q"] is Q
        assert torch.equal(given["cu_seqlens_q"].unique(), torch.tensor([0, 3, 5]))
        assert given["max_seqlen_q"] >= 3
        scale = given.get("softmax_scale", given.get("attn_scale"))
        assert scale == 0.25
        causal = given.get("causal", given.get("is_causal"))
        assert causal or given["attn_mask_type"] == "padding_causal_bottom_right", name
    _, backward = calls.values()
    assert lse is backward.get("softmax_lse", (backward.get("aux_ctx_tensors") or [None])[0])
    assert torch.equal(backward.get("dout", backward.get("d_o")), torch.ones_like(Q))


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


SOURCE = """
class Store:
    def put(self, tensors, *, last=None, first): ...
def function(q, k=None, /, v=1): ...
"""


def test_parameters_are_read_from_sources():
    assert write_signatures.parameters(SOURCE, "Store.put") == ["self", "tensors", "*last=", "*first"]
    assert write_signatures.parameters(SOURCE, "function") == ["q", "k=", "v="]
    assert write_signatures.parameters(SOURCE, "Store.pop") is None
    assert isinstance(write_signatures.FILE, Path)


def test_the_stand_in_for_mambas_kernel_takes_what_every_release_takes():
    names = list(inspect.signature(mamba_stand_in.mamba_split_conv1d_scan_combined).parameters)
    (*_, last), main = SIGNATURES["mamba-ssm"]["mamba_split_conv1d_scan_combined"]
    assert [name.strip("=") for name in last] == names
    assert main == [["main"], [*last, "state_dtype="]]  # which Megatron gives where the kernel has it
