"""Kernels call their libraries by names that every release from the oldest supported one on has."""

import inspect
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels import AttentionCase, flash
from megatron_epp.runtime.attention.segments import SegmentTable
from scripts import write_signatures
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
