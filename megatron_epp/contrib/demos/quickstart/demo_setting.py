"""Sizes of the demonstration, its trainings, and the costs that their plans use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_epp.cli.terminal import progress
from megatron_epp.contrib.demos.fidelity import traces
from megatron_epp.cost.library import load_costs
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.launch.runs import AS_MEGATRON, WARM_UP, RecordedRun, learnt_costs, tiny_gpt, train
from megatron_epp.mcore.pinned import RECORD
from megatron_epp.plan.plan import Plan
from megatron_epp.report.measured import Measured

CAP_SHARE = 0.9
"""Cap on activations, as a share of what whole documents take: just below it."""
PER_STAGE = 4
"""Documents of a batch for each stage, by the rule that four microbatches per stage make the bubble small (GPipe)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the demonstration, and its folder.

    Attributes:
        folder: for everything that it writes.
        num_ranks: of the pipeline, one stage each.
        context: tokens of the longest document.
        iterations: of a training whose time counts, after `WARM_UP` others.
        rounds: trainings with each schedule.
    """

    folder: Path
    num_ranks: int
    context: int
    iterations: int
    rounds: int

    @property
    def batch(self) -> int:
        """Documents of a batch."""
        return PER_STAGE * self.num_ranks

    def flags(self, data: str) -> dict[str, Any]:
        """Return the flags of trainings on documents with this prefix."""
        return tiny_gpt(
            data_path=data,
            lr_warmup_iters=0,  # or the first step would change nothing
            global_batch_size=self.batch,
            pipeline_model_parallel_size=self.num_ranks,
            seq_length=self.context,
            max_position_embeddings=self.context,
            **AS_MEGATRON,  # schedules are compared on the same stages, of which learnt costs are
        )

    def train(self, name: str, data: str, iterations: int, record: bool = False, **changes: Any) -> RecordedRun:
        """Train in a folder of its own."""
        settings = self.flags(data) | {"train_iters": iterations} | changes
        folder = self.folder / "trainings" / name
        environment = {RECORD: str(folder)} if record else {}
        with progress(f"training: {name.replace('-', ' ')}"):
            return train(folder, self.num_ranks, settings, program="megatron_epp.mcore.pinned", environment=environment)

    def traced(self, name: str) -> list[tuple[Plan, Measured]]:
        """Read plans and times of the counted iterations of a training with `every_iteration`."""
        return traces(self.folder / "trainings" / name, WARM_UP + self.iterations)[WARM_UP:]

    @property
    def every_iteration(self) -> dict[str, Any]:
        """Flags that write the plan and the times of every iteration."""
        return {"epp_trace": list(range(1, WARM_UP + self.iterations + 1)), "epp_measure_memory": True}


def measured_costs(setting: Setting, data: str) -> Path:
    """Learn the model's times on this machine in a short training; return the file with them."""
    with progress("training: learning costs"):
        return learnt_costs(setting.folder / "trainings" / "learning-costs", setting.num_ranks, setting.flags(data))


def cap_gb(peak_bytes: int, costs: PipelineCosts) -> float:
    """Return the cap in 2^30 bytes that leaves activations a `CAP_SHARE` of a peak, on ranks with more weights less."""
    return (CAP_SHARE * peak_bytes + min(stage.static_bytes for stage in costs.stages)) / 2**30


def known_costs(path: Path) -> PipelineCosts:
    """Read the file of `measured_costs`."""
    costs = load_costs(str(path))
    assert isinstance(costs, PipelineCosts)
    return costs
