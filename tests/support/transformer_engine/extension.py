"""The functions of Transformer Engine's compiled extension that Megatron's layers call, in plain torch.

They take and return what the compiled ones do: the same shapes and types, written into the given tensors where those are given,
and they save nothing of their own. What is left out is refused by name when it is called.
"""

import enum
import re
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.transformer_engine.casts import cast, empty, values

NAME = "transformer_engine_torch"


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FP8FwdTensors(enum.IntEnum):
    GEMM1_INPUT, GEMM1_WEIGHT, GEMM1_OUTPUT, GEMM2_INPUT, GEMM2_WEIGHT, GEMM2_OUTPUT = range(6)
    GEMM3_INPUT, GEMM3_WEIGHT, GEMM3_OUTPUT = range(6, 9)


class FP8BwdTensors(enum.IntEnum):
    GRAD_OUTPUT1, GRAD_INPUT1, GRAD_OUTPUT2, GRAD_INPUT2, GRAD_OUTPUT3, GRAD_INPUT3 = range(6)


_TYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


def module_of(package: Path, version: str) -> types.ModuleType:
    """Return the extension that a package's sources ask for: what is here, and what is refused."""
    sources = "\n".join(path.read_text() for path in sorted((package / "pytorch").rglob("*.py")))
    asked = _OURS | set(re.findall(r"\b(?:tex|ext)\.(\w+)", sources))
    for names in re.findall(rf"from {NAME} import \(?([\w\s,]+)", sources):
        asked |= set(re.findall(r"\w+", names))
    members = {name: dict.fromkeys(re.findall(rf"\b{name}\.(NVTE_\w+)", sources)) for name in asked if name[0].isupper()}
    return _Extension({name: members.get(name, {}) for name in asked}, version)


class _Extension(types.ModuleType):
    def __init__(self, asked: dict[str, dict[str, None]], version: str) -> None:
        super().__init__(NAME)
        self.__spec__, self.__file__ = ModuleSpec(NAME, None), __file__
        self.__all__ = sorted(asked)
        for name, members in asked.items():
            setattr(self, name, globals()[name] if name in _OURS else _left_out(name, members, version))


def _left_out(name: str, members: dict[str, None], version: str) -> Any:
    """Return what stands for a class or an enumeration, or a function that refuses."""
    if members:
        return enum.IntEnum(name, {member: number for number, member in enumerate(members)})
    if name[0].isupper():
        return _Numbered(name, (), {})

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{NAME}.{name} of {version} is not among the functions that run without a GPU")

    return refuse


class _Numbered(type):
    """Class of an enumeration whose members are numbered as they are first asked for: only their equality counts."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = sum(isinstance(value, int) for value in vars(cls).values())
        setattr(cls, name, number)
        return number


def _product(a: Tensor, transposes_a: bool, b: Tensor, transposes_b: bool) -> Tensor:
    """Multiply as cuBLAS does, to which matrices are columns: ``b' @ a'``, where a given transpose of either is taken."""
    left = b.flatten(0, -2) if not transposes_b else b.flatten(0, -2).t()
    return left @ (a.flatten(0, -2).t() if transposes_a else a.flatten(0, -2))


def generic_gemm(
    a: Tensor,
    transposes_a: bool,
    b: Tensor,
    transposes_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_type: DType | None,
    bias: Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulates: bool,
    split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the product, the gradient of the bias where `grad` asks for it, and nothing for what is left out."""
    if quantizer is not None or gelu or comm_overlap is not None:
        raise NotImplementedError("generic_gemm into FP8, with GELU or overlapped communication needs a GPU")
    a, b = values(a, along_tokens=not transposes_a), values(b, along_tokens=transposes_b)
    found = _product(a, transposes_a, b, transposes_b)
    if alpha != 1.0:
        found = alpha * found
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        found = found + bias
    if not transposes_b:
        found = found.view(*b.shape[:-1], found.shape[-1])
    if out is None:
        kind = a.dtype if out_type is None else _TYPES[DType(int(out_type))]
        return found.to(kind), bias_grad, None, None
    if accumulates:
        out.add_(found.view(out.shape))
    else:
        out.copy_(found.view(out.shape))
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transposes_a: bool,
    b: Sequence[Tensor],
    transposes_b: bool,
    out: Sequence[Tensor],
    out_type: DType,
    sizes: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_type: DType,
    single_output: bool,
    pre_gelu: Sequence[Tensor],
    grad: bool,
    workspaces: Sequence[Tensor],
    workspace_size: int,
    accumulates: bool,
    split_accumulator: bool,
    margin: int,
) -> Sequence[Tensor]:
    """Multiply each pair into its output, or into its rows of the only output."""
    outs = out[0].split(list(sizes or ())) if single_output else out
    for number, (one, two, into) in enumerate(zip(a, b, outs, strict=True)):
        one, two = values(one, along_tokens=not transposes_a), values(two, along_tokens=transposes_b)
        if not two.numel():  # no token for this expert
            if not accumulates:
                into.zero_()
            continue
        found = _product(one, transposes_a, two, transposes_b)
        if bias[number].numel():
            if grad:
                bias[number].copy_(two.sum(0))
            else:
                found = found + bias[number]
        (into.add_ if accumulates else into.copy_)(found.view(into.shape))
    return bias


def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Tensor | None = None) -> Any:
    assert noop is None  # of graphs
    return cast(x, quantizer, out)


def dequantize(x: Any, kind: DType) -> Tensor:
    return values(x).to(_TYPES[DType(int(kind))])


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return grad.flatten(0, -2).sum(0), cast(grad, quantizer)


def split_quantize(x: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    return [cast(part, quantizer) for part, quantizer in zip(x.split(list(sizes)), quantizers, strict=True)]


def create_empty_quantized_tensor(quantizer: Any, shape: Sequence[int], kind: torch.dtype, *_: Any) -> Any:
    return empty(quantizer, torch.Size(shape), kind)


def fused_multi_row_padding(x: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]) -> None:
    """Write an expert's rows each to the head of its rows in `out`, and zeros behind them, or cut these off again."""
    for rows, into in zip(x.split(list(sizes)), out.split(list(padded)), strict=True):
        count = min(len(rows), len(into))
        into[:count].copy_(rows[:count])
        into[count:].zero_()


fused_multi_row_unpadding = fused_multi_row_padding


def fp8_transpose(data: Tensor, kind: Any, out: Tensor | None = None) -> Tensor:
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def swap_first_dims(x: Tensor, out: Tensor) -> Tensor:
    return out.copy_(x.transpose(0, 1))


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, kind: Any, margin: int, zero_centered: bool
) -> tuple[Tensor, None, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    return _written(x.float() * scale[:, None] * _gain(weight, zero_centered), out, quantizer, kind), None, scale


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    normed, given = x.float() * scale[:, None], grad.float()
    wanted = given * _gain(weight, zero_centered)
    found = scale[:, None] * (wanted - normed * (wanted * normed).mean(-1, keepdim=True))
    return found.to(x.dtype), (given * normed).sum(0).to(weight.dtype)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    kind: Any,
    margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.float().mean(-1)
    centred = x.float() - mean[:, None]
    scale = torch.rsqrt(centred.square().mean(-1) + eps)
    found = centred * scale[:, None] * _gain(weight, zero_centered) + bias.float()
    return _written(found, out, quantizer, kind), mean, scale


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed, given = (x.float() - mean[:, None]) * scale[:, None], grad.float()
    wanted = given * _gain(weight, zero_centered)
    found = scale[:, None] * (wanted - wanted.mean(-1, keepdim=True) - normed * (wanted * normed).mean(-1, keepdim=True))
    return found.to(x.dtype), (given * normed).sum(0).to(weight.dtype), given.sum(0).to(weight.dtype)


def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _written(found: Tensor, out: Tensor | None, quantizer: Any, kind: Any) -> Tensor:
    if out is not None:
        return out.copy_(found)
    normed = found.to(kind if isinstance(kind, torch.dtype) else _TYPES[DType(int(kind))])
    return normed if quantizer is None else cast(normed, quantizer)


def fused_rope_forward(x: Tensor, freqs: Tensor, *settings: Any) -> Tensor:
    """Turn the first channels of every head by the angles of its position; ``(tokens, batch, heads, channels)``."""
    cos, sin, own = _angles(x, freqs, *settings)
    return _with_rest(own * cos + _turned(own, settings[-4]) * sin, x)


def fused_rope_backward(grad: Tensor, freqs: Tensor, *settings: Any) -> Tensor:
    cos, sin, own = _angles(grad, freqs, *settings)
    return _with_rest(own * cos - _turned(own * sin, settings[-4]), grad)


def _angles(x: Tensor, freqs: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return cosines, sines and the channels that turn. Older releases leave the first positions out of some calls."""
    *starts, _, _, packed, _, _ = settings
    if any(one is not None for one in (*starts, packed)) or x.dim() != 4:
        raise NotImplementedError("fused RoPE of packed sequences, or from other positions, needs a GPU")
    angles = freqs[: x.shape[0]]
    return angles.cos(), angles.sin(), x[..., : freqs.shape[-1]].float()


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _with_rest(found: Tensor, x: Tensor) -> Tensor:
    return torch.cat((found.to(x.dtype), x[..., found.shape[-1] :]), dim=-1)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)
        if not torch.isfinite(source).all():
            overflow.fill_(1)


def multi_tensor_scale_tensor(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: Tensor) -> None:
    multi_tensor_scale(chunk, overflow, lists, float(scale))


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else torch.empty(0)


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    corrects_bias: int,
    decay: float,
) -> None:
    """One step of Adam (mode 0: decay is in the gradient) or AdamW (mode 1), in the order of the compiled kernel."""
    correction1, correction2 = (1 - beta**step if corrects_bias else 1.0 for beta in (beta1, beta2))
    for grad, weight, first, second, *copies in zip(*lists, strict=True):
        given = grad.float()
        if mode == 0:
            given = given + decay * weight.float()
        first.mul_(beta1).add_((1 - beta1) * given)
        second.mul_(beta2).add_((1 - beta2) * given * given)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        if mode == 1:
            update = update + decay * weight.float()
        weight.sub_((rate * update).to(weight.dtype))
        for copy in copies:
            copy.copy_(weight)


def get_cudnn_version() -> int:
    return 91600


def get_cublasLt_version() -> int:
    return 130000


def get_num_cublas_streams() -> int:
    return 4


def device_supports_multicast(*_: Any) -> bool:
    return False


_OURS = {
    name
    for name, value in list(globals().items())
    if name != "module_of" and name[0] != "_" and getattr(value, "__module__", "") == __name__
}
