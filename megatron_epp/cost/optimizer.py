"""Bytes of weights, gradients and optimizer states, as Megatron's flags say, and the ranks that share them.

The only statement of bytes per parameter. Checked on CPU against the tensors of Megatron's optimizers after a step; what
Transformer Engine's optimizer does on GPUs follows its source (2.1 and later).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_epp.cost.memory import Static
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.reading import brief, naming_file, whole

KINDS = ("adam", "sgd", "muon", "dist_muon")
"""Values of Megatron's ``optimizer`` whose bytes are known."""
DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of a value, by the names that Megatron's flags have for types."""
DTYPE_FLAGS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_PRECISE = "use_precision_aware_optimizer"
FLAGS = ("optimizer", _PRECISE, *DTYPE_FLAGS, "optimizer_cpu_offload", "optimizer_offload_fraction")
"""Flags of Megatron's optimizer that commands take, with underscores."""
TRAINED_SHARE = "epp_trained_share"
"""Name among Megatron's flags for the share of a model's parameters that train."""
_FP32_BYTES = 4

type Sharing = Literal["elements", "matrices", "parameters", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters of a stage on a rank: in matrices of layers, in those of experts, and in `others`, which Muon
    leaves to Adam: the embedding, the output layer and vectors. `largest` is of one matrix, `largest_other` of one of the
    others.
    """

    matrices: float = 0.0
    experts: float = 0.0
    others: float = 0.0
    largest: float = 0.0
    largest_other: float = 0.0

    @property
    def count(self) -> float:
        return self.matrices + self.experts + self.others

    def share(self, share: float) -> Parameters:
        """Return a share of each kind; the largest matrices may be among them as a whole."""
        return replace(self, matrices=share * self.matrices, experts=share * self.experts, others=share * self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerBytes:
    """Bytes that a training holds of a parameter on the device, and how ranks share the states of the optimizer."""

    weight: float  # as the model computes with it, on every rank
    gradient: float  # in the buffer in which gradients are accumulated, on every rank
    state: float  # the optimizer's copy of the weight and its moments
    matrix_state: float  # the same for a matrix of a layer, which Muon treats differently
    # What a rank has of the states that `holders` share. elements: an equal part of all (Megatron's distributed optimizer);
    # matrices: whole matrices of layers, and an equal part of the others (its layer-wise one); parameters: whole matrices and
    # whole others (its layer-wise one without a layout of its buffers); none: all.
    sharing: Sharing
    holders: int  # ranks that hold the same weights: data-parallel replicas times context-parallel ranks
    expert_holders: int  # ranks that hold the same experts
    trained_share: float = 1.0  # share of the parameters that train, which alone have gradients and states

    @staticmethod
    def of_flags(flags: Mapping[str, Any], weight_bytes: float | None = None) -> OptimizerBytes:
        """Return the bytes that follow from Megatron's flags, by default with the distributed optimizer.

        Flags' names have underscores, types are named as in `DTYPE_BYTES`, and ``epp_trained_share`` is `trained_share`. A
        weight has `weight_bytes`, by default as ``bf16`` and ``fp16`` say. Raises `EppError` for flags that Megatron refuses
        together, or whose bytes are unknown.
        """
        settings = {name: value for name, value in flags.items() if value is not None}
        is_half = bool(settings.get("bf16") or settings.get("fp16"))
        weight = (2.0 if is_half else 4.0) if weight_bytes is None else weight_bytes
        kind, is_precise = settings.get("optimizer", "adam"), bool(settings.get(_PRECISE))
        types = _types(settings)
        _check(settings, kind, is_precise, types)
        state = matrix_state = _adam_bytes(settings, weight, is_precise, types)
        copy = _FP32_BYTES if weight < _FP32_BYTES else 0
        if kind == "sgd":
            state = matrix_state = copy + _FP32_BYTES
        elif kind in ("muon", "dist_muon"):
            matrix_state = copy + _FP32_BYTES
            state = matrix_state if settings.get("muon_scalar_optimizer") == "lion" else state
        holders = _size(settings, "data_parallel_size") * _size(settings, "context_parallel_size")
        tensor = _size(settings, "tensor_model_parallel_size")
        sharing_experts = _size(settings, "expert_model_parallel_size") * _size(settings, "expert_tensor_parallel_size", tensor)
        return OptimizerBytes(
            weight=weight,
            gradient=_gradient_bytes(settings, weight, types),
            state=state,
            matrix_state=matrix_state,
            sharing=_sharing(settings, kind),
            holders=holders,
            expert_holders=max(1, holders * tensor // sharing_experts),
            trained_share=settings.get(TRAINED_SHARE, 1.0),
        )

    def static(self, parameters: Parameters, trained: Parameters | None = None) -> Static:
        """Return what a rank holds throughout, of shared states the most. By default `trained_share` of each kind trains."""
        trained = parameters.share(self.trained_share) if trained is None else trained
        matrices = self._most(trained.matrices, self.holders, trained.largest, ("matrices", "parameters"))
        experts = self._most(trained.experts, self.expert_holders, trained.largest, ("matrices", "parameters"))
        others = self._most(trained.others, self.holders, trained.largest_other, ("parameters",))
        return Static(
            weights=int(parameters.count * self.weight),
            gradients=int(trained.count * self.gradient),
            optimizer=int((matrices + experts) * self.matrix_state + others * self.state),
        )

    def _most(self, count: float, holders: int, largest: float, whole: tuple[Sharing, ...]) -> float:
        """Return how many of `count` parameters a rank has states for: where they are shared `whole`, at most. A rank that gets
        the next of them has the fewest so far, so its part exceeds an equal one by less than the largest.
        """
        if self.sharing == "none":
            return count
        equal = count / holders
        return min(count, equal + (1 - 1 / holders) * largest) if self.sharing in whole else equal


def _types(settings: Mapping[str, Any]) -> dict[str, str]:
    types = {name: settings.get(name, "fp32") for name in DTYPE_FLAGS}
    for name, value in types.items():
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise EppError(f"{flag_of(name)} is {brief(value)}; it must be one of {', '.join(DTYPE_BYTES)}")
    return types


def _check(settings: Mapping[str, Any], kind: Any, is_precise: bool, types: Mapping[str, str]) -> None:
    if kind not in KINDS:
        raise EppError(f"bytes of {flag_of('optimizer')} {brief(kind)} are not known: give one of {', '.join(KINDS)}")
    if is_precise and kind != "adam":
        raise EppError(f"{flag_of(_PRECISE)} is for {flag_of('optimizer')} adam, not {kind}: leave one of them out")
    lower = [f"{flag_of(name)} {value}" for name, value in types.items() if value != "fp32"]
    offload = [flag_of("optimizer_cpu_offload")] if settings.get("optimizer_cpu_offload") else []
    if (needing := lower or offload) and not is_precise:
        raise EppError(f"{', '.join(needing)} needs {flag_of(_PRECISE)}: add that, or leave it out")
    share = settings.get("optimizer_offload_fraction", 1.0)
    if type(share) not in (int, float) or not 0 <= share <= 1:
        raise EppError(f"{flag_of('optimizer_offload_fraction')} is {brief(share)}; it must be a share, 0 to 1")


def _adam_bytes(settings: Mapping[str, Any], weight: float, is_precise: bool, types: Mapping[str, str]) -> float:
    copy, moments = (_FP32_BYTES if weight < _FP32_BYTES else 0), 2 * _FP32_BYTES
    if settings.get("optimizer_cpu_offload"):  # whose optimizers have states in fp32, whatever types are given
        return float((copy + moments) * (1 - settings.get("optimizer_offload_fraction", 1.0)))
    if not is_precise:
        return copy + moments
    copy = DTYPE_BYTES[types["main_params_dtype"]]
    if copy == _FP32_BYTES and weight < _FP32_BYTES and not settings.get("fp16"):
        copy = 2  # Transformer Engine keeps the 16 bits that bf16 leaves out
    return copy + DTYPE_BYTES[types["exp_avg_dtype"]] + DTYPE_BYTES[types["exp_avg_sq_dtype"]]


def _gradient_bytes(settings: Mapping[str, Any], weight: float, types: Mapping[str, str]) -> float:
    if settings.get("accumulate_allreduce_grads_in_fp32") or weight >= _FP32_BYTES:
        return _FP32_BYTES
    in_fp32 = not (settings.get("fp16") or settings.get("grad_reduce_in_bf16") or types["main_grads_dtype"] != "fp32")
    return _FP32_BYTES if in_fp32 else weight


def _sharing(settings: Mapping[str, Any], kind: str) -> Sharing:
    is_distributed = settings.get("use_distributed_optimizer", True)
    if kind in ("adam", "sgd"):  # Megatron's distributed optimizer takes no SGD
        return "elements" if is_distributed and kind == "adam" else "none"
    if not (is_distributed or settings.get("use_layer_wise_distributed_optimizer") or kind == "dist_muon"):
        return "none"
    return "matrices" if settings.get("use_layer_wise_param_layout", True) else "parameters"


def _size(settings: Mapping[str, Any], name: str, default: int = 1) -> int:
    with naming_file(name):
        return whole(settings.get(name, default), 1)
