"""On a GPU every attention kernel that can serve agrees with plain causal attention, and the first of them is chosen."""

import pytest
import torch

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels.base import backward_by_heads
from megatron_epp.runtime.attention.segments import SegmentTable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CHUNKS = {
    "packed": Chunk((Segment(0, 0, 300), Segment(1, 0, 1), Segment(2, 0, 77))),
    "split": Chunk((Segment(0, 256, 384),)),
    "hybrid": Chunk((Segment(0, 256, 300), Segment(1, 0, 64))),
    "one token after a prefix": Chunk((Segment(0, 1000, 1001),)),
}
HEADS = 8
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def dense(q, k, v, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khc->qhc", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def usable(kernel, case):
    if obstacle := kernel.obstacle(case):
        pytest.skip(f"{kernel.name}: {obstacle}")
    return kernel


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.parametrize("kernel", [*kernels.kernels_of("auto")], ids=lambda kernel: kernel.name)
def test_output_and_gradients_agree_with_dense_attention(kernel, kind, kv_heads, dtype, channels):
    usable(kernel, kernels.AttentionCase("cuda", dtype, channels, HEADS, kv_heads))
    table = SegmentTable.build(CHUNKS[kind], CHUNKS[kind].num_tokens)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(tokens, heads):
        return torch.randn(tokens, heads, channels, device="cuda", dtype=dtype, generator=generator)

    num_keys, scale = table.key_starts[-1], channels**-0.5
    q, k, v = random(table.num_tokens, HEADS), random(num_keys, kv_heads), random(num_keys, kv_heads)
    grad = random(table.num_tokens, HEADS)
    out, saved = kernel.forward(q, k, v, table, scale)
    found = kernel.backward(grad, q, k, v, out, saved, table, scale)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    rows = []
    for i in range(len(table.segments)):
        queries, keys = slice(*table.query_starts[i : i + 2]), slice(*table.key_starts[i : i + 2])
        rows.append(dense(inputs[0][queries], inputs[1][keys], inputs[2][keys], scale))
    expected = torch.cat(rows)
    expected.backward(grad.double())
    for actual, wanted in zip((out, *found), (expected, *(x.grad for x in inputs)), strict=True):
        assert (actual.double() - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()


@pytest.mark.parametrize("kernel", [*kernels.kernels_of("auto")], ids=lambda kernel: kernel.name)
def test_key_heads_that_go_one_after_the_other_have_the_gradients_of_all_at_once(kernel):
    usable(kernel, kernels.AttentionCase("cuda", torch.bfloat16, 64, HEADS, 2))
    table = SegmentTable.build(CHUNKS["hybrid"], CHUNKS["hybrid"].num_tokens)
    tokens, keys = table.num_tokens, table.key_starts[-1]
    q, k, v = (torch.randn(*size, 64, device="cuda", dtype=torch.bfloat16) for size in ((tokens, HEADS), (keys, 2), (keys, 2)))
    out, saved = kernel.forward(q, k, v, table, 0.125)
    inputs = out, q, k, v, out, saved, table, 0.125
    groups = []

    def take(dk, dv, heads):
        groups.append((dk, dv))
        return dk[:tokens], dv[:tokens]

    dq, *_ = backward_by_heads(kernel, *inputs, take, count=1)
    assert [dk.shape[1] for dk, _ in groups] == [1, 1]
    apart = dq, *(torch.cat(each, 1) for each in zip(*groups, strict=True))
    for one, wanted in zip(apart, kernel.backward(*inputs), strict=True):
        assert (one.double() - wanted.double()).norm() <= 1e-3 * wanted.double().norm()  # atomics add in any order


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["bf16", "fp16", "fp32"])
def test_the_first_kernel_that_can_serve_proves_itself_and_is_chosen(dtype):
    case = kernels.AttentionCase("cuda", dtype, 128, HEADS, 2)
    chosen, obstacles = kernels.explain(case)
    able = [kernel for kernel in [*kernels.kernels_of("auto")] if kernel.obstacle(case) is None]
    assert chosen is able[0], obstacles


@pytest.mark.parametrize("kernel", [*kernels.kernels_of("auto")], ids=lambda kernel: kernel.name)
def test_attention_waits_for_nothing_on_the_host_and_draws_no_random_numbers(kernel):
    usable(kernel, kernels.AttentionCase("cuda", torch.bfloat16, 64, HEADS, HEADS))
    q, k, v = (torch.randn(64, HEADS, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    table = SegmentTable.build(Chunk((Segment(0, 0, 64),)), 64)
    before = torch.cuda.get_rng_state()
    for mode in ("default", "error"):  # the first time it is built
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out, saved = kernel.forward(q, k, v, table, 0.125)
            kernel.backward(out, q, k, v, out, saved, table, 0.125)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), before)
