"""A training script that keeps the gradients of every iteration and the weights after the last, tensor by tensor.

Models may have the layers of `stand_ins`. With ORDER=reversed in the environment, plans made from learnt costs run microbatches
from the last to the first.
"""

import os
from pathlib import Path

import torch

from megatron_epp.mcore import entry


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.training import training

        from megatron_epp.mcore.model import gpt
        from tests.support.mcore import local_hybrid, stand_ins

        stand_ins.use_plain_attention()
        local_hybrid.use_torch_norms()
        if os.environ.get("ORDER") == "reversed":
            reverse()
        kept = {"losses": [], "gradients": [], "weights": {}}
        training.train_step = keep(training.train_step, kept)
        gpt.pretrain()
        torch.save(kept, Path(os.environ["RECORD_TO"], f"rank{os.environ['RANK']}.pt"))


def keep(train_step, kept):
    """Keep what a training step made, whose losses and gradients are scaled by another power of two each time."""

    def step(forward_step, data_iterator, model, *args, **kwargs):
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
        from megatron.training import get_args

        from megatron_epp.mcore import features

        number, config = len(kept["losses"]) + 1, args[2]
        config.grad_scale_func = lambda loss: loss * 2.0 ** (number % 3)
        loss, *rest = train_step(forward_step, data_iterator, model, *args, **kwargs)
        predicted_more = {name: sums for name, sums in MTPLossLoggingHelper.tracker.items() if name == "values"}
        sums = dict(loss or {}) | features.logged_router_losses() | predicted_more
        kept["losses"].append({name: torch.as_tensor(value).detach().clone() for name, value in sums.items()})
        named = {f"{number}.{name}": one for number, chunk in enumerate(model) for name, one in chunk.named_parameters()}
        kept["gradients"].append({name: one.main_grad.detach().clone() for name, one in named.items()})
        if number == get_args().train_iters:
            for chunk in model:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
            kept["weights"] = {name: one.detach().clone() for name, one in named.items()}
        return (loss, *rest)

    return step


def reverse():
    """Let plans have one order only."""
    from megatron_epp.mcore.microbatches import planning

    planning._orders = lambda shapes: [tuple(reversed(range(len(shapes))))]


if __name__ == "__main__":
    main()
