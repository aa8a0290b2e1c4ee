"""Features: what a run can do besides slices. The core knows the protocols here and the table, and imports no feature.

A rank imports the functions that a feature's row in `FEATURES` names if the run wants it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.problem import Options, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_epp.cost import PipelineCosts
    from megatron_epp.plan import Op, Plan


class Asked(NamedTuple):
    """Wishes of a user: flags, and a loss of theirs."""

    args: Namespace
    loss: Any = None


class RunFeature:
    """A feature in one rank's run. Every rank of the job calls these methods in the order of the table."""

    rows_of: Callable[[Tensor], Tensor | None] | None = None
    """Function from a loss mask ``[tokens]`` on the CPU to the tokens that pass the output layer (None: all), on a rank that
    needs labels for the feature."""
    adds_gradients = False
    """True if the first stage's gradients are complete only behind its last backward."""

    def allocate(self) -> None:
        """Allocate memory that caps must count, before they are settled."""

    def measuring(self) -> AbstractContextManager[None]:
        """Return a context in which the rank's stages run alone, while costs are measured."""
        return nullcontext()

    def settled(self, costs: PipelineCosts) -> None:
        """Prepare what depends on costs."""

    def before(self, batch: Any) -> None:
        """Prepare an iteration, given its `data.batch.GlobalBatch`."""

    def running(
        self, plan: Plan, inputs: Callable[[int], Any] | None, reduction: Any
    ) -> AbstractContextManager[Mapping[Op, Any]]:
        """Return a context around an iteration's actions, with the handlers of the feature's own operations.

        `inputs` are a chunk's, as stages get them; None if chunks are a caller's microbatches. `reduction` is of gradients.
        """
        return nullcontext({})

    @property
    def num_bytes(self) -> int:
        """Bytes that the feature holds on the device for chunks in flight."""
        return 0


def _never(*asked: Any) -> bool:
    del asked
    return False


@dataclass(frozen=True, slots=True)
class Feature:
    """A row, of what a run can do, of what the planner can, or of both. Targets are ``module:function``.

    Attributes:
        gain: a figure with its command or page, or the models that need the feature.
        wanted: reads what a user asked of a run, and imports nothing; `planned` what a planner is asked.
        adopt: from a model chunk, flags and virtual stage; changes the chunk before data parallelism wraps it.
        head: from a run, its model chunks and `mcore.model.stage.HeadSettings`; changes how the last stage is made.
        orders: from a problem to the orders that a search tries (`planner.settings.Orders`).
        candidates: candidates (`planner.candidates`) with copies, if a recipe has some.
        search: walks on behind a search, from its candidates, its best and the fastest free of caps.
        fit: from an order, the same with whole backwards, tables and a problem to copies under the caps, or None.
        run: from a run whose ranks are connected to its `RunFeature`, or None where this model needs none.
    """

    name: str
    gain: str
    wanted: Callable[[Asked], bool] = _never
    planned: Callable[[Problem, Options], bool] = _never
    adopt: str = ""
    head: str = ""
    run: str = ""
    orders: str = ""
    candidates: str = ""
    search: str = ""
    fit: str = ""


def _joins(args: Namespace) -> bool:
    entry = PLANNERS.entry(getattr(args, "epp_planner", "greedy"))
    return entry is not None and entry.joins


_HERE = "megatron_epp.features."
FEATURES = (
    Feature(
        "losses of the user's",
        "1.26 to 1.91 times as fast as verl's microbatches: python -m scripts.bench.rl",
        wanted=lambda asked: asked.loss is not None or getattr(asked.args, "epp_loss", None) is not None,
        adopt=f"{_HERE}losses.value_head:put_head",
        head=f"{_HERE}losses.stage_loss:compute",
        run=f"{_HERE}losses.stage_loss:sample_loss",
    ),
    Feature(
        "vocabulary shards",
        "efficiency 0.895 -> 0.949: python -m scripts.bench.layouts",
        wanted=lambda asked: getattr(asked.args, "epp_vocab_parallel", "off") == "on",
        adopt=f"{_HERE}vocabulary.vocabulary_shard:divide_output_layer",
        head=f"{_HERE}vocabulary.rank_vocabulary:end_without_head",
        run=f"{_HERE}vocabulary.rank_vocabulary:rank_vocabulary",
    ),
    Feature(
        "steps of two actions",
        "17 % less time at TP 8, 3 % at TP 2, by formula: docs/schedules.md, stp",
        wanted=lambda asked: getattr(asked.args, "epp_overlap_exchanges", False) or _joins(asked.args),
        run="megatron_epp.contrib.overlap.exchanges:Overlap",
    ),
    Feature(
        "exchange buffers",
        "models with experts that exchange tokens by DeepEP or HybridEP",
        wanted=lambda asked: getattr(asked.args, "moe_token_dispatcher_type", None) == "flex",
        run=f"{_HERE}exchanges.exchange_buffer:RunExchanges",
    ),
    Feature(
        "warm-up of attention",
        "models whose attention runs in cuDNN, which takes seconds for a first shape; ranks would wait for each other",
        wanted=lambda asked: getattr(asked.args, "epp_warm_up", "off") != "off",
        run=f"{_HERE}warm_up.kernel_warm_up:attention_warm_up",
    ),
    Feature(
        "several stages per rank",
        "1.307 -> 1.298 s: megatron-epp plan for the first batch of docs/comparison.md, --layout 8,8,8,8 and auto",
        planned=lambda problem, options: not problem.has_one_stage_per_rank,
        orders=f"{_HERE}stages.stage_orders:orders_of",
    ),
    Feature(
        "copies to the host",
        "1.03 to 1.11 times as fast on paper, with recompute modes: python -m scripts.bench.memory --every 4",
        planned=lambda problem, options: options.offload,
        candidates=f"{_HERE}copies.copied:copied",
        search=f"{_HERE}copies.copied:with_copies",
        fit=f"{_HERE}copies.fit_copies:copied_to_fit",
    ),
)
"""All features, in the order in which every rank asks them."""


def targets(asked: Asked, kind: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a kind (`adopt`, `head`, `run`) of the features that are wanted."""
    for feature in FEATURES:
        if (target := getattr(feature, kind)) and feature.wanted(asked):
            yield resolve_name(target)


def plan_targets(problem: Problem, options: Options, kind: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a kind (`orders`, `candidates`, `search`, `fit`) of the features that a planner is asked for."""
    for feature in FEATURES:
        if (target := getattr(feature, kind)) and feature.planned(problem, options):
            yield resolve_name(target)
