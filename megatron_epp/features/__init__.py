"""Features: what a run can do besides slices. The core knows the protocols here and the table, and imports no feature.

A rank imports the functions that a feature's row in `FEATURES` names if the run wants it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from megatron_epp.plan.planners import PLANNERS

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_epp.cost import PipelineCosts
    from megatron_epp.cost.kept import KeptCosts
    from megatron_epp.data.batch import GlobalBatch
    from megatron_epp.plan import Op, Plan
    from megatron_epp.port.planning import BatchPlanner
    from megatron_epp.runtime.autograd.saved import SavedTensors
    from megatron_epp.runtime.recorder import Recorder


class Asked(NamedTuple):
    """Wishes of a user: flags, a loss of theirs, and whether chunks are microbatches of theirs, which run whole."""

    args: Namespace
    loss: Any = None
    whole: bool = False


class RunFeature:
    """A feature in one rank's run. Every rank of the job calls these methods in the order of the table."""

    rows_of: Callable[[Tensor], Tensor | None] | None = None
    """Function from a loss mask ``[tokens]`` on the CPU to the tokens that pass the output layer (None: all), on a rank that
    needs labels for the feature."""
    adds_gradients = False
    """True if the first stage's gradients are complete only behind its last backward."""
    reads_times = False
    """True if `after` reads the recorder's times."""

    def allocate(self) -> None:
        """Allocate memory that caps must count, before they are settled."""

    def measuring(self) -> AbstractContextManager[None]:
        """Return a context in which the rank's stages run alone, while costs are measured."""
        return nullcontext()

    def costs(self, prior: PipelineCosts) -> PipelineCosts:
        """Return the run's costs, where the feature knows better ones."""
        return prior

    def measured(self, costs: PipelineCosts) -> PipelineCosts:
        """Return costs with what the feature measures on the rank's stages, whose state the caller restores."""
        return costs

    def settled(self, costs: PipelineCosts) -> None:
        """Prepare what depends on costs, and limit the run's planning problem."""

    def planner(self, planner: BatchPlanner) -> BatchPlanner:
        """Return what plans the run's batches, on a rank that plans."""
        return planner

    def before(self, batch: GlobalBatch) -> None:
        """Prepare an iteration."""

    def counting(self, plan: Plan, parameters: Iterable[Tensor], others: Callable[[], int]) -> SavedTensors | None:
        """Return the feature's own `SavedTensors`, with these arguments, if it does more with them than count."""
        return None

    def running(
        self, plan: Plan, inputs: Callable[[int], Any] | None, reduction: Any, handlers: Mapping[Op, Any]
    ) -> AbstractContextManager[Mapping[Op, Any]]:
        """Return a context around an iteration's actions, with handlers of the feature's own operations, and some around those
        of `handlers`, which are the runtime's and those of features before it in the table.

        `inputs` are a chunk's, as stages get them; None if chunks are a caller's microbatches. `reduction` is of gradients.
        """
        return nullcontext({})

    def after(self, plan: Plan | None, recorder: Recorder, measured: Callable[[], Mapping[str, Any]]) -> None:
        """Follow a training iteration, whose plan is None if this rank had nothing to run.

        `measured` returns what the run knows of it besides the recorder's times, as keywords of `Learner.add`.
        """

    def close(self) -> None:
        """End the feature's work with the run."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the feature holds on the device for chunks in flight."""
        return 0

    @property
    def figures(self) -> Mapping[str, Any]:
        """Figures of the last iteration: `host_peak` in bytes for its report, `offloadable_share` for costs that are learnt."""
        return {}


@runtime_checkable
class Learning(Protocol):
    """A feature that learns costs from a run's first iterations, as seen by a run that needs one."""

    @property
    def is_recording(self) -> bool:
        """True if the next training iteration is measured."""

    @property
    def is_done(self) -> bool: ...
    @property
    def saved(self) -> KeptCosts | None:
        """Learnt costs, to be kept with checkpoints; None while they are learnt."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated on this rank in a measured iteration; 0 where memory is not measured."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A row. Targets are ``module:function``.

    Attributes:
        gain: a figure with its command or page, or the models that need the feature.
        wanted: reads what a user asked for, and imports nothing of the feature.
        adopt: from a model chunk, flags and virtual stage; changes the chunk before data parallelism wraps it.
        head: from a run, its model chunks and `mcore.model.stage.HeadSettings`; changes how the last stage is made.
        run: from a run whose ranks are connected to its `RunFeature`, or None where this model needs none.
    """

    name: str
    gain: str
    wanted: Callable[[Asked], bool]
    adopt: str = ""
    head: str = ""
    run: str = ""


def _joins(args: Namespace) -> bool:
    entry = PLANNERS.entry(getattr(args, "epp_planner", "greedy"))
    return entry is not None and entry.joins


def _by_plans(asked: Asked) -> bool:
    return asked.whole or getattr(asked.args, "epp_schedule", "stock") == "elastic"


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
        "offload",
        "longest context of an 8B model on 8 GPUs 512K -> 2,048K: python -m scripts.bench.long --longest",
        wanted=lambda asked: resolve_name("megatron_epp.mcore.training.caps:offloads")(asked.args),
        run=f"{_HERE}offload.rank_offload:RankOffload",
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
        "learnt costs",
        "planned over measured time 0.96 to 0.98, by formula 0.73 to 0.80: docs/comparison.md; needed by whole microbatches",
        wanted=lambda asked: asked.whole or (_by_plans(asked) and asked.args.epp_costs == "learn"),
        run=f"{_HERE}learnt_costs.learn_costs:CostLearning",
    ),
    Feature(
        "slow stages",
        "a rank that takes 1.25 times its planned time, for which all others wait, is named: docs/troubleshooting.md",
        wanted=lambda asked: asked.whole or (_by_plans(asked) and asked.args.epp_costs != "analytic"),
        run=f"{_HERE}slow_stages.stage_watch:stage_watch",
    ),
)
"""All features, in the order in which every rank asks them."""


def targets(asked: Asked, kind: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a kind (`adopt`, `head`, `run`) of the features that are wanted."""
    for feature in FEATURES:
        if (target := getattr(feature, kind)) and feature.wanted(asked):
            yield resolve_name(target)
