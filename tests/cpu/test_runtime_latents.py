"""The relay and KV offload hand on latents, or keys and values of any widths, and gradients are those of whole sequences."""

import pytest
import torch

from megatron_epp.plan import Chunk, Segment, sizing
from megatron_epp.plan.kv_offload import head_parts, in_units
from megatron_epp.plan.shape_classes import token_class
from megatron_epp.plan.sizing import size_class
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels.base import of_narrow_values
from megatron_epp.runtime.attention.kernels.flash import FLASH_ATTN, TORCH_FLASH
from megatron_epp.runtime.attention.kernels.transformer_engine import TRANSFORMER_ENGINE
from megatron_epp.runtime.attention.segments import SegmentTable
from tests.cpu.test_runtime_kv_offload import CASES, HOSTS, run
from tests.cpu.test_runtime_relay import assert_equals_whole_sequences
from tests.support.runtime.relay_chunks import CHANNELS, QUERY_HEADS, RECOMPUTE, ChunkedLayer

RANK, ROTATED, UNROTATED = 6, 2, 3
LAYOUTS = {
    "narrow values": {"widths": (6, 4)},
    "wide values": {"widths": (4, 10)},
    "latents": {"kv_heads": 1, "widths": (RANK, ROTATED), "unrotated": UNROTATED},
}
HEAD_BYTES = 2 * token_class(1) * (UNROTATED + ROTATED + CHANNELS + 1) * 8
"""Of keys and values of a head and their gradients, for the few keys of these cases."""


def at_a_time(monkeypatch, heads):
    monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", 2 * heads * HEAD_BYTES)
    assert sizing.expanded_at_once(40, QUERY_HEADS, HEAD_BYTES / 2 / token_class(1)) == heads


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_have_the_gradients_of_whole_sequences_wherever_their_cache_is(layout, case, mode):
    resident, *kv_offload = (ChunkedLayer(*CASES[case], layers=2, **LAYOUTS[layout]) for _ in range(1 + len(HOSTS)))
    run(resident, mode=mode)
    assert_equals_whole_sequences(resident)
    for layer, make_host in zip(kv_offload, HOSTS.values(), strict=True):
        run(layer, make_host(), mode)
        for expected, actual in zip(resident.chunked(), layer.chunked(), strict=True):
            assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("case", CASES)
def test_latents_expanded_head_by_head_have_the_gradients_of_all_heads_at_once(monkeypatch, case, mode):
    at_a_time(monkeypatch, 1)
    layer = ChunkedLayer(*CASES[case], layers=2, **LAYOUTS["latents"])
    run(layer, mode=mode, fp32_gradients="on")
    assert_equals_whole_sequences(layer)


def test_sums_of_latents_over_groups_are_no_wider_in_the_relay(monkeypatch):
    """Planned memory of their gradients does not depend on the number of groups."""
    seen = []
    for heads in (QUERY_HEADS, 1):
        at_a_time(monkeypatch, heads)
        layer = ChunkedLayer(*CASES["one"], dtype=torch.bfloat16, **LAYOUTS["latents"])
        seen.append(run(layer))
    assert seen[0] == seen[1]


def test_a_slice_caches_its_latents_and_its_graph_keeps_no_keys_and_values():
    layer, kept = ChunkedLayer(*CASES["one"], **LAYOUTS["latents"]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer.forward(0)
    assert layer.contexts[0].view.num_cached == 9
    queries, output, log_sums = QUERY_HEADS * (UNROTATED + ROTATED), QUERY_HEADS * (CHANNELS + 1), QUERY_HEADS
    assert sum(x.numel() for x in kept) - layer.expansion.numel() == 9 * (queries + output + log_sums)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_take_what_the_layout_says(layout):
    layer, kv_offload = (ChunkedLayer(*CASES["one"], layers=2, **LAYOUTS[layout]) for _ in range(2))
    whole = layer.cache_bytes()
    gradient = layer.layers * 37 * layer.cached_width * 8
    assert run(layer) == [whole] * 4 + [whole + gradient] * 3 + [0]
    piece = size_class(37) * layer.cached_width * 8 // head_parts(LAYOUTS[layout].get("kv_heads", 2))
    assert run(kv_offload, host := HOSTS["at once"]()) == [2 * piece] * 4 + [3 * piece] * 4
    assert host.held_peak_bytes == in_units(2 * whole)


@pytest.mark.parametrize("kernel", [TRANSFORMER_ENGINE, FLASH_ATTN, TORCH_FLASH], ids=lambda x: x.name)
def test_fused_kernels_refuse_values_of_another_width_than_keys(kernel):
    case = kernels.AttentionCase("cuda", torch.bfloat16, 192, 16, 16, 128)
    assert kernel.obstacle(case) == "values of 128 channels: it takes as many as keys have, 192"
    assert kernels.choose(*(torch.zeros(2, 4, width) for width in (192, 192, 128))) is kernels.EXACT_ATTENTION


@pytest.mark.parametrize("kernel", [TRANSFORMER_ENGINE, FLASH_ATTN], ids=lambda x: x.name)
def test_fused_kernels_take_narrow_values_with_zeros_behind_them(kernel):
    case = kernels.AttentionCase("cuda", torch.bfloat16, 192, 16, 16, 128)
    assert of_narrow_values(kernel).obstacle(case) == kernel.obstacle(case._replace(value_channels=0))
    wide = of_narrow_values(kernel).obstacle(case._replace(value_channels=256))
    assert wide == "values of 256 channels: it takes at most as many as keys have, 192"


def test_zeros_behind_values_change_no_output_and_no_gradient():
    chunk = Chunk((Segment(0, 5, 12), Segment(1, 0, 3)))
    table = SegmentTable.build(chunk, chunk.num_tokens)
    random = torch.Generator().manual_seed(0)
    sizes = (10, 4, 6), (15, 2, 6), (15, 2, 4), (10, 4, 4)
    q, k, v, grad = (torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes)
    results = []
    for kernel in (kernels.EXACT_ATTENTION, of_narrow_values(kernels.EXACT_ATTENTION)):
        out, saved = kernel.forward(q, k, v, table, 0.4)
        results.append((out, *kernel.backward(grad, q, k, v, out, saved, table, 0.4)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
