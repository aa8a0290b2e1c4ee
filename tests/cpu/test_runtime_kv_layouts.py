"""The relay and KV offload hand on whatever a layout caches, and attention's gradients are those of whole sequences."""

import pytest
import torch

from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.sizing import size_class
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels.base import of_narrow_values
from megatron_epp.runtime.attention.layout import KEYS_AND_VALUES, KVLayout, SegmentTable
from tests.cpu.test_runtime_kv_offload import CASES, HOSTS, run
from tests.cpu.test_runtime_relay import assert_equals_whole_sequences
from tests.support.runtime.relay_chunks import RECOMPUTE, ChunkedLayer

LATENT, ROTARY = 6, 2


def keys_and_values(cached):
    latent, rotary = cached
    return torch.cat([latent, rotary], 2), latent


def gradients(dk, dv):
    return dk[..., :LATENT] + dv, dk[..., LATENT:]


LAYOUTS = {
    "narrow values": {"widths": (6, 4)},
    "wide values": {"widths": (4, 10)},
    "a latent and a rotary part for all heads": {
        "kv_heads": 1,
        "widths": (LATENT, ROTARY),
        "layout": KVLayout(keys_and_values, gradients),
    },
    "one tensor for keys and values": {
        "kv_heads": 2,
        "widths": (5,),
        "layout": KVLayout(lambda cached: (cached[0], cached[0]), lambda dk, dv: (dk + dv,)),
    },
}


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_take_what_the_layout_says(layout):
    layer, kv_offload = (ChunkedLayer(*CASES["one"], layers=2, **LAYOUTS[layout]) for _ in range(2))
    whole = layer.cache_bytes()
    gradient = layer.layers * 37 * layer.cached_width * 8
    assert run(layer) == [whole] * 4 + [whole + gradient] * 3 + [0]
    piece = size_class(37) * layer.cached_width * 8 // head_parts(LAYOUTS[layout].get("kv_heads", 2))
    assert run(kv_offload, HOSTS["at once"]()) == [2 * piece] * 4 + [3 * piece] * 4
    assert kv_offload.relay.offloaded.host_peak_bytes == 2 * whole


@pytest.mark.parametrize("kernel", [kernels.TRANSFORMER_ENGINE, kernels.FLASH_ATTN, kernels.TORCH_FLASH], ids=lambda x: x.name)
def test_fused_kernels_refuse_values_of_another_width_than_keys(kernel):
    case = kernels.AttentionCase("cuda", torch.bfloat16, 192, 16, 16, 128)
    assert kernel.obstacle(case) == "values of 128 channels: it takes as many as keys have, 192"
    assert kernels.choose(*(torch.zeros(2, 4, width) for width in (192, 192, 128))) is kernels.EXACT_ATTENTION


@pytest.mark.parametrize("kernel", [kernels.TRANSFORMER_ENGINE, kernels.FLASH_ATTN], ids=lambda x: x.name)
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


def test_keys_and_values_are_cached_as_they_are():
    k, v = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    assert KEYS_AND_VALUES.keys_and_values((k, v))[0] is k
    assert KEYS_AND_VALUES.gradients(k, v)[1] is v
