"""A feature in one rank's run: the protocol that iterations know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_epp.cost.kept import KeptCosts
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.data.batch import GlobalBatch
    from megatron_epp.plan import Op, Plan
    from megatron_epp.plan.measured import Measured
    from megatron_epp.port.planning import BatchPlanner
    from megatron_epp.runtime.autograd.saved import SavedTensors
    from megatron_epp.runtime.recorder import Recorder


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

        `measured` returns what the run knows of it besides the recorder's times: keywords of `Learner.add`, and spans.
        """

    def report(self, line: dict[str, Any], plan: Plan | None, measured: Measured | None) -> None:
        """Add figures to the line of an iteration's report, or write it; in the thread of reports, on ranks that read them."""

    def hint(self, plan: Plan, costs: PipelineCosts) -> str:
        """Return advice to log with an iteration; empty without any."""
        return ""

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
