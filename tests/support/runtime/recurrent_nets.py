"""Gated delta nets and Mamba-2 layers in plain torch: kernels token by token, as the libraries take their arguments."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.gated_delta import DeltaLayer
from megatron_epp.runtime.state_space import StateSpaceLayer

FILTER = 4
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 4, 3
DELTA_WIDTH, DELTA_CHANNELS = VALUE_HEADS * WIDTH, (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
HEADS, CHANNELS, STATE = 4, 3, 5
INNER, MIXED = HEADS * CHANNELS, HEADS * CHANNELS + 2 * STATE
WIDTHS = {"gate_width": INNER, "mixed_width": MIXED, "filter_width": FILTER}


def rule(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule token by token, as flash-linear-attention's kernel takes its arguments."""
    g, beta, offsets = options["g"], options["beta"], options.get("cu_seqlens")
    ends = [0, q.shape[1]] if offsets is None else offsets.tolist()
    outs, state = [], options["initial_state"]
    assert state is None or len(ends) == 2
    for start, end in pairwise(ends):
        memory = q.new_zeros(VALUE_HEADS, WIDTH, WIDTH) if state is None else state[0]
        for t in range(start, end):
            memory = memory * g[0, t].exp()[:, None, None]
            written = beta[0, t][:, None] * (v[0, t] - torch.einsum("hkv,hk->hv", memory, k[0, t]))
            memory = memory + torch.einsum("hk,hv->hkv", k[0, t], written)
            outs.append(torch.einsum("hkv,hk->hv", memory, q[0, t]) / WIDTH**0.5)
    return torch.stack(outs)[None], memory[None] if options["output_final_state"] else None


def convolve(rows: Tensor, filters: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    ahead = filters.shape[-1] - 1
    parts = [functional.pad(rows[0, start:end].t()[None], (ahead, 0)) for start, end in pairwise(offsets.tolist())]
    out = [functional.conv1d(part, filters[:, None], bias, groups=len(filters))[0].t() for part in parts]
    return functional.silu(torch.cat(out))[None]


class DeltaNet(torch.nn.Module):
    width = DELTA_WIDTH

    def __init__(self, packs: bool) -> None:
        super().__init__()
        make = partial(torch.randn, dtype=torch.float64)
        widths = KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH, VALUE_HEADS, VALUE_HEADS
        self.widths, self.packs = widths, packs
        self.weights = torch.nn.ParameterList()
        for _ in range(2):
            self.weights += 0.5 * make(DELTA_WIDTH, sum(widths)), 0.5 * make(DELTA_CHANNELS, 1, FILTER), 0.3 * make(VALUE_HEADS)

    def forward(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        into, filters, decay = self.weights[3 * number : 3 * number + 3]
        q, k, v, strength, gate = (x @ into).split(self.widths, dim=1)
        weights = {"number": number, "filters": filters, "bias": None, "decay": decay, "step": torch.zeros(VALUE_HEADS)}
        kernels = {"rule": rule, "convolve": convolve if self.packs else None, "activation": functional.silu}
        layer = DeltaLayer(**weights, **kernels, normalise=lambda heads: functional.normalize(heads, dim=-1))
        q, k, v = (part.unflatten(1, (-1, WIDTH)) for part in (q, k, v))
        return x + layer(q, (k, v, strength[..., None], gate[..., None]), context).flatten(1)


def scan(
    rows: Tensor,
    filters: Tensor,
    bias: Tensor,
    step: Tensor,
    decay: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:
    """Convolve, recur token by token and gate, as mamba-ssm's kernel does: the convolution always begins with zeros."""
    assert rows.shape[0] == 1
    assert seq_idx is None or initial_states is None
    numbers = torch.zeros(rows.shape[1], dtype=torch.int32) if seq_idx is None else seq_idx[0]
    outs, state = [], rows.new_zeros(HEADS, CHANNELS, STATE)
    for number in range(int(numbers.max()) + 1):
        gate, mixed, steps = rows[0][numbers == number].split([INNER, MIXED, HEADS], dim=1)
        padded = functional.pad(mixed.t()[None], (FILTER - 1, 0))
        mixed = functional.silu(functional.conv1d(padded, filters[:, None], bias, groups=MIXED))[0].t()
        x, into, out_of = mixed.split([INNER, STATE, STATE], dim=1)
        x, dt = x.unflatten(1, (HEADS, CHANNELS)), functional.softplus(steps + step)
        state = torch.zeros_like(state) if initial_states is None else initial_states[0]
        for t in range(len(x)):
            state = state * (dt[t] * decay).exp()[:, None, None]
            state = state + torch.einsum("h,hp,n->hpn", dt[t], x[t], into[t])
            outs.append((state @ out_of[t] + x[t]).flatten() * functional.silu(gate[t]))
    out = torch.stack(outs)[None]
    return (out, state[None]) if return_final_states else out


class StateSpaceNet(torch.nn.Module):
    width = INNER

    def __init__(self) -> None:
        super().__init__()
        make = partial(torch.randn, dtype=torch.float64)
        self.weights = torch.nn.ParameterList()
        for _ in range(2):
            self.weights += 0.2 * make(INNER, INNER + MIXED + HEADS), 0.5 * make(MIXED, FILTER), 0.3 * make(MIXED)
            self.weights += make(HEADS), -0.1 - make(HEADS).square()

    def forward(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        into, *weights = self.weights[5 * number : 5 * number + 5]
        named = dict(zip(("filters", "bias", "step", "decay"), weights, strict=True))
        return x + StateSpaceLayer(number=number, scan=partial(scan, **named), **WIDTHS)(x @ into, context)
