"""One run of training handed from process to process: each part loads what the one before has saved, and places stages anew,
with layers shared out unevenly.

Writes the losses of every part, and how far its final parameters are from those of one process that trained throughout.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from scripts.parity.cells import CONTEXT, Case, Cell
from scripts.parity.runs import Run
from tests.support.mcore.jobs.common import flags_of, trained

ITERATIONS = 5
TIED = "gpt2"
SHARDED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"

ALONE = Cell()
SLICED = "--epp-slices 3"
THERE_AND_BACK = Cell(dp=2, pp=2), f"{SLICED} --epp-placement v --pipeline-model-parallel-layout Ettt|t||L"
FOUR_RANKS = Cell(pp=4), f"{SLICED} --epp-placement v --pipeline-model-parallel-layout E|t|t|t||||tL"
LOOPED = Cell(pp=2), f"{SLICED} --pipeline-model-parallel-layout E|tt|t|tL"


def run(folder: Path) -> None:
    common = [*flags_of(folder, ITERATIONS, CONTEXT, 4), "--ckpt-format", "torch_dist"]
    gathers, reductions = folder / "gathers", folder / "reductions"
    record_calls(gathers, reductions)

    def train(cell: Cell, plan: str, optimizer: str, save: str, load: str | None = None, done: int = 0) -> list[Run]:
        """Train to the end, from the checkpoint after the `done` first iterations, and save the one after the next."""
        flags = [*common, "--save", str(folder / save), "--save-interval", str(done + 1)]
        if load is not None:
            (folder / load / "latest_checkpointed_iteration.txt").write_text(str(done))
            flags += ["--load", str(folder / load)]
        case = Case(cell, TIED, plan, optimizer)
        flags = case.elastic_flags(flags) if plan else (*case.stock_flags(flags), *shlex.split(optimizer))
        return trained(cell.num_processes, flags, folder)

    whole = train(ALONE, "", SHARDED, "whole")
    parts = {
        "whole": whole,
        "there and back": train(*THERE_AND_BACK, OVERLAPPED, "there and back", load="whole", done=1),
        "four ranks": train(*FOUR_RANKS, SHARDED, "four ranks", load="there and back", done=2),
        "looped": train(*LOOPED, SHARDED, "looped", load="four ranks", done=3),
        "alone": train(ALONE, "", SHARDED, "alone", load="looped", done=4),
    }
    report: dict[str, Any] = {}
    for name, runs in parts.items():
        report[name] = {"losses": next(run.losses for run in runs if run.losses), "apart": apart(whole[0], runs)}
    report["gathers"] = len(gathers.read_text())
    report["reductions"] = [[int(number) for number in line.split()] for line in reductions.read_text().splitlines()]
    (folder / "report.json").write_text(json.dumps(report))


def record_calls(gathers: Path, reductions: Path) -> None:
    """Append to files for every call of a chunk's `param_sync_func` and `grad_sync_func`, which get parameters as an argument.

    For a gather it is a letter; for a reduction a line with pipeline rank, number of the chunk, and number of collectives.
    """
    from megatron.core import mpu
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import get_attr_wrapped_model

    start_param_sync, start_grad_sync = DistributedDataParallel.start_param_sync, DistributedDataParallel.start_grad_sync

    def gather(self: Any, *parameters: Any, **named: Any) -> Any:
        if parameters:
            with gathers.open("a") as file:
                file.write("g")
        return start_param_sync(self, *parameters, **named)

    def reduce(self: Any, *parameters: Any, **named: Any) -> Any:
        if parameters:
            with reductions.open("a") as file:
                chunk, rank = get_attr_wrapped_model(self, "vp_stage"), mpu.get_pipeline_model_parallel_rank()
                file.write(f"{rank} {chunk} {len(self.bucket_groups)}\n")
        return start_grad_sync(self, *parameters, **named)

    DistributedDataParallel.start_param_sync, DistributedDataParallel.start_grad_sync = gather, reduce


def apart(whole: Run, runs: list[Run]) -> float:
    assert {name for run in runs for name in run.final} == whole.final.keys()
    found = [(whole.final[name], tensor) for run in runs for name, tensor in run.final.items()]
    return max(float((tensor - wanted).norm() / wanted.norm()) for wanted, tensor in found)
