"""On a GPU, attention goes through the FlashAttention that torch ships: it agrees with plain causal attention."""

import pytest
import torch

from megatron_epp.runtime import kernels
from megatron_epp.runtime.segments import SegmentTable
from megatron_epp.schedule import Chunk, Segment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CHUNKS = {
    "packed": Chunk((Segment(0, 0, 300), Segment(1, 0, 1), Segment(2, 0, 77))),
    "split": Chunk((Segment(0, 256, 384),)),
    "hybrid": Chunk((Segment(0, 256, 300), Segment(1, 0, 64))),
}


def dense(q, k, v, scale):
    """Causal attention of the last queries, written out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khc->qhc", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("kind", CHUNKS)
def test_output_and_gradients_agree_with_dense_attention(kind, kv_heads, dtype):
    table = SegmentTable.build(CHUNKS[kind], CHUNKS[kind].num_tokens)
    generator = torch.Generator("cuda").manual_seed(0)

    def random(tokens, heads):
        return torch.randn(tokens, heads, 64, device="cuda", dtype=dtype, generator=generator)

    num_keys = table.key_starts[-1]
    q, k, v = random(table.num_tokens, 8), random(num_keys, kv_heads), random(num_keys, kv_heads)
    grad = random(table.num_tokens, 8)
    out, lse = kernels.forward(q, k, v, table, 0.125)
    found = kernels.backward(grad, q, k, v, out, lse, table, 0.125)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    rows = []
    for i in range(len(table.segments)):
        queries, keys = slice(*table.query_starts[i : i + 2]), slice(*table.key_starts[i : i + 2])
        rows.append(dense(inputs[0][queries], inputs[1][keys], inputs[2][keys], 0.125))
    expected = torch.cat(rows)
    expected.backward(grad.double())
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for actual, wanted in zip((out, *found), (expected, *(x.grad for x in inputs)), strict=True):
        assert (actual.double() - wanted).norm() <= tolerance * wanted.norm()
