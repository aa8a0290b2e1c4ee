"""The parts of mamba-ssm, causal-conv1d and einops that Megatron's Mamba-2 layers use, in plain torch: kernels are Triton's.

Like the kernel this one keeps its inputs for the backward, and nothing that it makes of them.

`install` puts them where Megatron imports them from. Imports Megatron.
"""

import importlib
import sys
from types import ModuleType

import torch
from torch.nn import functional

from tests.support.mcore.fla_stand_in import keeping_inputs

VERSION = "2.3.2.post1"
"""Of mamba-ssm, whose function has these parameters (`tests/cpu/test_library_signatures.py`)."""


@keeping_inputs
def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    """Compute all pairs of tokens of a sequence, in fp64, so that it does not matter where it is cut."""
    assert activation == "silu"
    assert dt_limit == (0.0, float("inf"))
    assert rmsnorm_weight is outproj_weight is outproj_bias is None
    assert seq_idx is None or initial_states is None  # the kernel takes the state for that of sequences numbered 0
    tokens, heads, inner = zxbcdt.shape[1], len(A), len(A) * headdim
    states = (len(conv1d_weight) - inner) // 2
    numbers = torch.zeros(1, tokens, dtype=torch.int32) if seq_idx is None else seq_idx
    is_before = (numbers[:, :, None] == numbers[:, None]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    gate, mixed, steps = zxbcdt.double().split([inner, inner + 2 * states, heads], dim=-1)
    filters = conv1d_weight.double()
    convolved = conv1d_bias.double()
    for back in range(min(filters.shape[1], tokens)):  # the convolution always begins with zeros
        behind = functional.pad(mixed, (0, 0, back, 0))[:, :tokens]
        sees = functional.pad(is_before.diagonal(-back, 1, 2), (back, 0))
        convolved = convolved + sees[..., None] * behind * filters[:, -1 - back]
    x, into, out_of = functional.silu(convolved).split([inner, states, states], dim=-1)
    x = x.unflatten(2, (heads, headdim))
    into, out_of = (part.unflatten(2, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for part in (into, out_of))
    dt = functional.softplus(steps + dt_bias.double())
    decays = (dt * A.double()).cumsum(dim=1)
    lasting = (decays[:, :, None] - decays[:, None]).masked_fill(~is_before[..., None], -torch.inf).exp()
    y = torch.einsum("bthn,bshn,btsh,bsh,bshp->bthp", out_of, into, lasting, dt, x)
    state = torch.einsum("bshn,bsh,bsh,bshp->bhpn", into, lasting[:, -1], dt, x)
    if initial_states is not None:
        initial = initial_states.double()
        y = y + torch.einsum("bthn,bth,bhpn->bthp", out_of, decays.exp(), initial)
        state = state + decays[:, -1].exp()[..., None, None] * initial
    y = (y + D.double()[:, None] * x).flatten(2) * functional.silu(gate)
    return (y.to(zxbcdt.dtype), state.float()) if return_final_states else y.to(zxbcdt.dtype)


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype)), None
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x, z=None):
        assert z is None
        groups = x.unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def _chunk_scan(*args, **named):
    """Stand for `mamba_chunk_scan_combined`, which no training calls."""
    raise NotImplementedError


def _rearrange(x, pattern):
    swap = {"l b d -> b l d": (0, 1), "b l d -> l b d": (0, 1)}
    return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(*swap[pattern])


def _repeat(x, pattern, g, n, r):
    assert pattern == "l b (g n) -> l b (g r n)"
    return x.unflatten(2, (g, n)).repeat_interleave(r, dim=2).flatten(2)


def install():
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    ssm, scan = "mamba_ssm.ops.triton", {"mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined}
    parts = {
        "mamba_ssm": {"__version__": VERSION},
        "mamba_ssm.ops": {},
        ssm: {},
        f"{ssm}.layernorm_gated": {"RMSNorm": RMSNorm},
        f"{ssm}.ssd_combined": scan | {"mamba_chunk_scan_combined": _chunk_scan},
        "causal_conv1d": {"__version__": "1.6.1", "causal_conv1d_fn": None},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
        "einops": {"rearrange": _rearrange, "repeat": _repeat},
    }
    for path, names in parts.items():
        module = sys.modules.setdefault(path, ModuleType(path))
        for name, value in names.items():
            setattr(module, name, value)
    if not mamba_mixer.HAVE_MAMBA_SSM:  # its classes have the norm as a base
        for module in (mamba_context_parallel, mamba_mixer):
            importlib.reload(module)
