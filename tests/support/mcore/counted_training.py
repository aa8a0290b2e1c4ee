"""A training script that counts the copies to the device that this package makes in every iteration, by what makes them.

On a CPU nothing is copied, but the calls that copy are made all the same.
"""

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch

from megatron_epp.mcore import entry

OWN = "megatron_epp."
SCRIPT = "megatron_epp.mcore.model.gpt"
"""Forward step of the script, which brings the microbatches of `--epp-microbatches user` to the device itself."""


def counting(copy, name, counts):
    """The method `copy` of tensors, which counts its calls by this package's modules: all that may copy to another device."""

    @functools.wraps(copy)
    def counted(self, *args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        moves = name != "to" or any(isinstance(value, torch.device | str) for value in (*args, *kwargs.values()))
        if moves and caller.startswith(OWN) and caller != SCRIPT:
            counts[f"{name} in {caller}"] += 1
        return copy(self, *args, **kwargs)

    return counted


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.training import training

        from megatron_epp.mcore.model import gpt
        from megatron_epp.runtime.upload import Uploader

        counts, by_iteration = Counter(), []
        for name in ("to", "cuda", "pin_memory"):
            setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), name, counts))
        begin, train_step = Uploader.begin, training.train_step

        def counted_begin(self, tensors):
            upload = begin(self, tensors)
            counts["uploads"] += 1
            counts["tensors"] += len(tensors)
            return upload

        def counted_step(*args, **kwargs):
            if not by_iteration:
                counts.clear()  # of building the model
            answer = train_step(*args, **kwargs)
            by_iteration.append(dict(counts))
            return answer

        Uploader.begin, training.train_step = counted_begin, counted_step
        gpt.pretrain()
        Path(os.environ["RECORD_TO"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(by_iteration))


if __name__ == "__main__":
    main()
