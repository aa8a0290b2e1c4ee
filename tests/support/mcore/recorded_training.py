"""A training script that writes every iteration's exact loss and gradient norm, and a digest of the final weights."""

import functools
import hashlib
import json
import os
from pathlib import Path

from megatron_epp.mcore import entry


def record(train_step, steps, digests):
    @functools.wraps(train_step)
    def recorded(forward_step, data_iterator, model, *args, **kwargs):
        from megatron.training import get_args

        loss, *rest = answer = train_step(forward_step, data_iterator, model, *args, **kwargs)
        seen = {}
        if rest[4] is not None:  # a step that fp16 skipped has none
            seen["grad_norm"] = float(rest[4])
        if loss:
            seen["loss"] = float(loss["lm loss"])
        steps[get_args().curr_iteration + 1] = seen
        digest = hashlib.sha256()
        for chunk in model:
            for parameter in chunk.parameters():
                digest.update(parameter.detach().contiguous().view(-1).float().numpy().tobytes())
        digests.append(digest.hexdigest())
        return answer

    return recorded


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.training import training

        from megatron_epp.mcore.model import gpt

        steps, digests = {}, []
        training.train_step = record(training.train_step, steps, digests)
        gpt.pretrain()
        path = Path(os.environ["RECORD_TO"], f"rank{os.environ['RANK']}.json")
        path.write_text(json.dumps({"steps": steps, "weights": digests[-1]}))


if __name__ == "__main__":
    main()
