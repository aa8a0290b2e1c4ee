"""Trains many tiny iterations through Megatron's loop and prints how many tensors there are after some of them."""

import gc
import os
import sys
from typing import Any

import torch

from megatron_epp.mcore import entry
from tests.support.mcore.figures import record_figures
from tests.support.mcore.soak_cases import EARLY, FLAGS, LATE


def main() -> None:
    entry.prepare()
    from megatron.training import training

    from megatron_epp.mcore.model import gpt

    step, seen, count = training.train_step, {}, 0

    def train_step(*args: Any, **named: Any) -> Any:
        nonlocal count
        answer = step(*args, **named)
        count += 1
        if count in EARLY or count in LATE:
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            seen[count] = tensors
        return answer

    training.train_step = train_step
    sys.argv = [sys.argv[0], *FLAGS, "--data-path", os.environ["SOAK_DATA"]]
    gpt.pretrain()
    record_figures({"tensors": seen})


if __name__ == "__main__":
    main()
