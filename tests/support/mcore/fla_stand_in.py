"""The functions of flash-linear-attention that Megatron's gated delta nets call, in plain torch: its kernels are Triton's.

Like these they keep their inputs for the backward, and nothing that they make of them.

`install` puts them where Megatron has imported them from. Imports Megatron.
"""

import sys
from functools import partial, wraps
from itertools import pairwise
from types import ModuleType

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def l2norm(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt(x.square().sum(dim=dim, keepdim=True) + eps)


def keeping_inputs(function):
    """Return a function that computes again in its backward what it has made of its inputs."""

    @wraps(function)
    def run(*args, **kwargs):
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        others, count = {name: value for name, value in kwargs.items() if name not in names}, len(args)

        def call(*tensors):
            with saved_tensors_hooks(lambda x: x, lambda x: x):  # as in a kernel, what is inside nobody sees
                return function(*tensors[:count], **others, **dict(zip(names, tensors[count:], strict=True)))

        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(call, *args, *(kwargs[name] for name in names), use_reentrant=True)

    return run


@keeping_inputs
def causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    """Convolve packed sequences ``[1, tokens, channels]`` with ``[channels, width]``."""
    assert initial_state is None
    assert not output_final_state
    (parts,) = _sequences(cu_seqlens, x)
    convolve = partial(functional.conv1d, weight=weight[:, None], bias=bias, groups=len(weight))
    out = [convolve(functional.pad(part.transpose(1, 2), (weight.shape[1] - 1, 0))).transpose(1, 2) for part in parts]
    out = torch.cat(out, dim=1)
    return (functional.silu(out) if activation in ("silu", "swish") else out), None


@keeping_inputs
def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """Solve for all tokens of a sequence at once, in fp64, so that it does not matter where it is cut."""
    assert not use_qk_l2norm_in_kernel
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, states = [], []
    tensors = (x.double().transpose(1, 2) for x in (q, k, v, g, beta))
    for number, (qs, ks, vs, gs, bs) in enumerate(zip(*_sequences(cu_seqlens, *tensors, dim=2), strict=True)):
        rows = q.shape[0], q.shape[2], q.shape[3], v.shape[3]
        initial = (torch.zeros(rows) if initial_state is None else initial_state[number : number + 1]).double()
        decays = gs.cumsum(dim=-1)
        is_after = torch.ones(2 * [qs.shape[2]], dtype=torch.bool).triu(1)
        lasting = (decays[..., None] - decays[..., None, :]).masked_fill(is_after, -torch.inf).exp()
        before = decays[..., None].exp()
        # A token adds to the state its value less what the state reads at its key, with all that tokens before have added.
        own = bs[..., None] * (vs - before * (ks @ initial))
        added = torch.linalg.solve_triangular(bs[..., None] * lasting * (ks @ ks.mT), own, upper=False, unitriangular=True)
        outs.append(scale * (before * (qs @ initial) + (lasting * (qs @ ks.mT)) @ added))
        states.append(before[..., -1:, :] * initial + (lasting[..., -1:, :].mT * ks).mT @ added)
    return torch.cat(outs, dim=2).transpose(1, 2).to(v.dtype), torch.cat(states).float() if output_final_state else None


def _sequences(cu_seqlens, *tensors, dim=1):
    for x in tensors:
        ends = [0, x.shape[dim]] if cu_seqlens is None else cu_seqlens.tolist()
        yield [x.narrow(dim, start, end - start) for start, end in pairwise(ends) if start < end]


def install(**others):
    from megatron.core.ssm import gated_delta_net

    parts = {
        "l2norm": ("fla.modules.l2norm", l2norm),
        "causal_conv1d": ("fla.modules.convolution", causal_conv1d),
        "chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    }
    own = [module for name, module in sys.modules.items() if name.startswith(gated_delta_net.__name__)]
    for name, (path, function) in parts.items():
        for at in range(1, path.count(".") + 2):
            folder = ".".join(path.split(".")[:at])
            sys.modules.setdefault(folder, ModuleType(folder))
        setattr(sys.modules[path], name, others.get(name, function))
        for module in own:
            if hasattr(module, name):
                setattr(module, name, others.get(name, function))
    for module in own:
        if hasattr(module, "HAVE_FLA"):
            module.HAVE_FLA = True
