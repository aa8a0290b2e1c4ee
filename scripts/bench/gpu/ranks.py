"""Small trainings in slices on 1, 2 and 4 ranks, which may share a GPU, next to those of whole sequences: numbers, no speed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.launch.machine import count_gpus
from megatron_epp.tools.cli.first_run.training import deviation
from megatron_epp.tools.launch.runs import AS_MEGATRON
from scripts.bench.gpu.runs import Launches, Settings, Sizes

FP32_ALLOWED = 1e-5
"""Largest relative difference of a loss in fp32."""
BF16_FLOOR = 1e-4
"""Difference of a loss in bf16 that is near enough, however near Megatron's own is to its run in fp32."""
_RANKS_AT_A_TIME = 6

STOCK: Settings = {"epp_schedule": "stock"}
_SLICED: Settings = {"epp_slices": 3}
TWO: Settings = {"pipeline_model_parallel_size": 2}
_V: Settings = TWO | {"num_virtual_stages_per_pipeline_rank": 2, "epp_placement": "v"}
_TENSOR: Settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_APART: Settings = {"epp_split_weight_gradient": True}
_OVERLAPPED: Settings = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True, slots=True)
class Row:
    """A training in slices, and the one that it is compared with.

    Attributes:
        ranks: of both.
        both: flags of both.
        sliced: flags of the one in slices alone.
        whole: flags of the other alone. Megatron's own schedule, where it has the layout: it has no placement in a V, and deals
            the tokens of a sequence out to context-parallel ranks in another order.
        is_bf16: compare both with a third one, Megatron's own in fp32.
    """

    ranks: int
    both: Settings = field(default_factory=dict)
    sliced: Settings = field(default_factory=dict)
    whole: Settings = field(default_factory=lambda: STOCK)
    is_bf16: bool = False


ROWS = {
    "one stage": Row(1),
    "every layer recomputed": Row(1, sliced={"epp_recompute": 4}),
    "weight gradients apart": Row(1, sliced=_APART),
    "one stage, bf16": Row(1, is_bf16=True),
    "a stage per rank": Row(2, TWO),
    "there and back, weight gradients apart": Row(2, _V, _APART, {"epp_slices": 1}),
    "tensor and sequence parallel": Row(2, _TENSOR),
    "context parallel": Row(2, {"context_parallel_size": 2}, whole={"epp_schedule": "whole"}),
    "data parallel, reductions overlapped": Row(2, _OVERLAPPED),
    "a stage per rank, bf16": Row(2, TWO, is_bf16=True),
    "four stages": Row(4, {"pipeline_model_parallel_size": 4}, {"epp_recompute": 1}),
    "tensor parallel in a pipeline": Row(4, _TENSOR | TWO),
    "four stages, bf16": Row(4, {"pipeline_model_parallel_size": 4}, is_bf16=True),
}


def trainings(row: Row, sizes: Sizes) -> dict[str, Settings]:
    """Return the flags of a row's trainings: `sliced`, `whole` and, in bf16, `exact`, Megatron's own in fp32."""
    base = sizes.settings(max(sizes.short), num_layers=4, bf16=row.is_bf16, **sizes.narrow, **AS_MEGATRON, **row.both)
    # Ranks share a GPU, so none may plan with all of it.
    settings_of = {"sliced": base | _SLICED | {"epp_memory_cap_gb": 8} | row.sliced, "whole": base | row.whole}
    if row.is_bf16:
        settings_of["exact"] = settings_of["whole"] | {"bf16": False}
    # Fused attention has no fp32, and Megatron's own runs need some.
    plain = {"attention_backend": "unfused"} if base.get("transformer_impl") == "transformer_engine" else {}
    return {name: settings if settings["bf16"] else settings | plain for name, settings in settings_of.items()}


def compare(launches: Launches, sizes: Sizes, rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    """Train all that some rows need, several side by side on a GPU, for no time is measured.

    Returns:
        For each row `ours`, the largest relative difference of a loss, and what is `allowed`; `failed` with the reason instead
        where a training did not end well.
    """
    wanted = [(name, kind, row.ranks, flags) for name, row in rows.items() for kind, flags in trainings(row, sizes).items()]
    at_a_time = max(1, _RANKS_AT_A_TIME // max(row.ranks for row in rows.values())) if count_gpus() else 1

    def losses(name: str, kind: str, ranks: int, settings: Settings) -> list[float] | Exception:
        try:
            return launches.run(f"{name}, {kind}", settings, sizes.short, ranks).run.losses
        except Exception as error:  # the other rows are still of use
            return error

    with ThreadPoolExecutor(at_a_time) as pool:
        done = list(pool.map(lambda arguments: losses(*arguments), wanted))
    verdicts: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        runs = {kind: result for (its, kind, *_), result in zip(wanted, done, strict=True) if its == name}
        ended = {kind: result for kind, result in runs.items() if not isinstance(result, Exception)}
        if len(ended) < len(runs):
            verdicts[name] = {"failed": "; ".join(f"{kind}: {result}" for kind, result in runs.items() if kind not in ended)}
            continue
        floor = BF16_FLOOR if row.is_bf16 else FP32_ALLOWED
        far = deviation(ended.get("exact", ended["whole"]), ended["whole"], ended["sliced"], floor)
        verdicts[name] = {"ours": far.ours, "allowed": far.allowed, "holds": far.holds}
    return verdicts
