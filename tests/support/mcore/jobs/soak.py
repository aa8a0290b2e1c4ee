"""Trains some hundred tiny iterations through Megatron's loop and records what Python has after some of them."""

import gc
import sys
import time
from typing import Any

import torch

from megatron_epp.mcore import entry
from tests.support.mcore.soak_cases import CASES


def run(data: str, name: str) -> dict[str, Any]:
    entry.prepare()
    from megatron.training import training

    from megatron_epp.mcore.iteration import sliced_run
    from megatron_epp.mcore.model import gpt

    case = CASES[name]
    step, seen, done = training.train_step, {}, 0

    def count() -> int:
        while sliced_run.current().watchdog._activities:
            time.sleep(0.01)
        things = gc.get_objects()
        return len(things) if case.counts_objects else sum(issubclass(type(thing), torch.Tensor) for thing in things)

    def train_step(*args: Any, **named: Any) -> Any:
        nonlocal done
        answer = step(*args, **named)
        done += 1
        if done == case.early.start - 1:  # from here on cycles of references stay, too, and count
            gc.collect()
            gc.disable()
        if done in case.early or done in case.late:
            seen[done] = count()
        return answer

    training.train_step = train_step
    sys.argv = [sys.argv[0], *case.flags, "--data-path", data]
    gpt.pretrain()
    return {"counts": seen}
