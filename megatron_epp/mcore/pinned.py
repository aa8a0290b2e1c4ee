"""Training for measurements: `python -m megatron_epp.mcore.pinned FLAGS` trains as `megatron_epp.mcore.pretrain_gpt` does, with
every rank on a core of its own if the machine has no GPU. With `RECORD` set each rank also writes its gradients. Ranks of short
trainings are forked from a process that has called `preload`.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
from pathlib import Path
from typing import Any

from megatron_epp.plan.writing import replacing

_LATE = (  # what training imports when it is under way
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron_epp.mcore.iteration.document_schedule",
    "megatron_epp.mcore.model.gpt",
    "torch._dynamo",
)
RECORD = "EPP_RECORD_GRADIENTS"
"""Environment variable: folder to which every rank writes the gradients of the first iteration."""


def pin(rank: int) -> None:
    """Bind this process to one of the cores that it may use, chosen by its rank, with one thread.

    Processes that it forks, such as the planning process, may use all of these cores: cores of waiting ranks are free.
    """
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.register_at_fork(after_in_child=functools.partial(os.sched_setaffinity, 0, cores))
    torch.set_num_threads(1)


def main() -> None:
    """Train with the flags of the command line, on the core of this rank."""
    from megatron_epp.launch.machine import count_gpus
    from megatron_epp.mcore import entry, pretrain_gpt

    if not count_gpus():
        pin(int(os.environ["LOCAL_RANK"]))
    if folder := os.environ.get(RECORD):
        with entry.errors_in_one_line():
            entry.prepare()
        record_first(Path(folder) / f"gradients-{os.environ['RANK']}.pt")
    pretrain_gpt.main()


def record_first(path: Path) -> None:
    """Make the training of this process write the gradients of its first iteration, as the optimizer gets them, to a file."""
    import torch
    from megatron.training import training

    from megatron_epp.mcore.training.gradients import reduced_gradients

    step = training.train_step

    def train_step(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any, **named: Any
    ) -> Any:
        def recorded_passes(**call: Any) -> Any:
            answer = passes(**call)
            if not path.exists():
                with replacing(path) as scratch:
                    torch.save({name: gradient.cpu() for name, gradient in reduced_gradients(model).items()}, scratch)
            return answer

        return step(forward_step, data, model, optimizer, scheduler, config, recorded_passes, **named)

    path.unlink(missing_ok=True)
    training.train_step = train_step


def preload() -> None:
    """Import and patch everything that a training needs, so that processes forked later inherit it."""
    from megatron_epp.mcore import entry
    from megatron_epp.mcore.patches import fingerprints, patching
    from megatron_epp.port import forked

    with entry.errors_in_one_line():
        entry.prepare()
    for module in _LATE:
        importlib.import_module(module)
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training.argument_utils import ArgumentGroupFactory as Factory

    # Megatron parses the descriptions of flags from its settings' sources, for every parser.
    descriptions: Any = functools.cache(functools.partial(Factory._get_field_docstrings, object.__new__(Factory)))
    Factory._get_field_docstrings = lambda _, settings: descriptions(settings)
    entry.megatron_parser()
    patching.unknown(fingerprints.RELIED_ON)  # reads their sources, whose fingerprints are then known
    # Processes that are forked, of checkpoint writers and planners, have what is imported here; spawned ones would import
    # Megatron again, seconds for each.
    queue = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = functools.partial(queue, mp_mode="fork")
    forked.fork_workers()
    gc.freeze()  # what is there now stays, and need not be looked through after every training


if __name__ == "__main__":
    main()
