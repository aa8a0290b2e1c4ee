"""Proofs of the attention kernels of this machine: each against torch's own attention in fp64, one segment after the other.

For benchmarks. Training has a verification of its own (`runtime.attention.kernels`), of the one
kernel that it is about to use, against this package's exact attention on a small chunk. Here exact attention is proven too, and
chunks are larger: packed sequences, a slice behind a prefix, both in one chunk, and a single token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.segments import SegmentTable

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest relative errors of a kernel's output and gradients, in norms, by the type of its inputs: a few roundings of bf16
(2^-8) and of fp16 (2^-11), and a few hundred of fp32 (2^-24).
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a kernel for a data type.

    Attributes:
        kernel: its name.
        dtype: name of the type, such as ``bfloat16``.
        obstacle: why it does not run here, or what it raised; empty if it ran.
        error: largest relative error of its outputs and gradients over all chunks; None if it did not run.
        tolerance: largest allowed.
        is_chosen: training uses it for such tensors.
    """

    kernel: str
    dtype: str
    obstacle: str
    error: float | None
    tolerance: float
    is_chosen: bool

    @property
    def holds(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


def chunks(tokens: int) -> dict[str, Chunk]:
    """Return chunks to prove kernels with, whose slice has so many tokens, behind a prefix four times as long."""
    prefix = 4 * tokens
    return {
        "packed": Chunk((Segment(0, 0, tokens), Segment(1, 0, 1), Segment(2, 0, tokens // 3))),
        "slice": Chunk((Segment(0, prefix, prefix + tokens),)),
        "slice and short sequence": Chunk((Segment(0, prefix, prefix + tokens // 2), Segment(1, 0, tokens // 2))),
        "one token": Chunk((Segment(0, prefix, prefix + 1),)),
    }


def prove(device: str, channels: int, query_heads: int, kv_heads: int, tokens: int) -> Iterator[Proof]:
    """Run every kernel in every type that it takes.

    Args:
        device: ``cuda``, where all kernels are tried, or ``cpu``, where exact attention is.
        tokens: of the slice in `chunks`.
    """
    for dtype, tolerance in TOLERANCES.items():
        case = kernels.AttentionCase(device, dtype, channels, query_heads, kv_heads)
        chosen, _ = kernels.explain(case)
        for kernel in kernels.kernels_of("auto") if device == "cuda" else (kernels.EXACT_ATTENTION,):
            error, obstacle = None, kernel.obstacle(case) or ""
            if not obstacle:
                try:
                    error = max(_error(kernel, case, chunk) for chunk in chunks(tokens).values())
                except Exception as failure:  # libraries raise what they like where a build does not suit the device
                    obstacle = f"it fails ({type(failure).__name__}: {failure})"
            name = str(dtype).removeprefix("torch.")
            yield Proof(kernel.name, name, obstacle, error, tolerance, kernel is chosen)


def _error(kernel: kernels.Kernel, case: kernels.AttentionCase, chunk: Chunk) -> float:
    """Return the largest relative error, in norms, of the output and the gradients of q, k and v; infinite for NaN."""
    with _no_tf32():
        return _error_in_fp32(kernel, case, chunk)


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Multiply fp32 matrices in fp32, also where NVIDIA's containers allow TF32, with errors of 3e-4."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _error_in_fp32(kernel: kernels.Kernel, case: kernels.AttentionCase, chunk: Chunk) -> float:
    table, generator = SegmentTable.build(chunk, chunk.num_tokens), torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, case.channels, generator=generator).to(case.device, case.dtype)

    q, grad = random(table.num_tokens, case.query_heads), random(table.num_tokens, case.query_heads)
    k, v = random(table.key_starts[-1], case.kv_heads), random(table.key_starts[-1], case.kv_heads)
    scale = case.channels**-0.5
    with torch.no_grad():
        out, saved = kernel.forward(q, k, v, table, scale)
        results = out, *kernel.backward(grad, q, k, v, out, saved, table, scale)
    inputs = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    wanted_out = _reference(inputs, table, scale)
    wanted_out.backward(grad.double())
    wanted = wanted_out.detach(), *(tensor.grad for tensor in inputs)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True) if b is not None]
    return max(float("inf") if error != error else error for error in errors)


def _reference(inputs: Sequence[Tensor], table: SegmentTable, scale: float) -> Tensor:
    """Return torch's attention ``[tokens, query_heads, channels]`` of every segment, the last query of which sees all keys.

    Args:
        inputs: queries, keys and values, as `Kernel` takes them.
    """
    q, k, v = inputs
    rows, group = [], q.shape[1] // k.shape[1]
    for i in range(len(table.segments)):
        queries, keys = slice(*table.query_starts[i : i + 2]), slice(*table.key_starts[i : i + 2])
        query, key, value = (x.transpose(0, 1) for x in (q[queries], k[keys], v[keys]))
        key, value = (x.repeat_interleave(group, dim=0) for x in (key, value))
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=q.device).tril(key.shape[1] - query.shape[1])
        rows.append(scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(rows)
