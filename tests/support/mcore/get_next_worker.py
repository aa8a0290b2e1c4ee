"""A loop for reinforcement learning: microbatches of several samples, read by `get_next(keys)`; the loss gets their number.

Prints for each run of a plan the largest relative difference of gradients from stock's, the results, and where iterators stand.
"""

from functools import partial

import torch
import torch.distributed as dist

from tests.support.mcore import wrap_worker
from tests.support.mcore.figures import record_figures

SAMPLES = [[length // 4, length - length // 4] for length in wrap_worker.LENGTHS]
"""Lengths of the samples of every microbatch, in the order of `offset`."""
RUNS = 6


class Reader:
    """Columns of microbatches, read one after the other from `offset` on; a caller reads a second time with other keys."""

    def __init__(self):
        made = torch.Generator().manual_seed(7)
        self.columns = [
            {"total_lengths": lengths, "tokens": torch.randint(64, (1, sum(lengths)), generator=made), "rewards": 1.0 + number}
            for number, lengths in enumerate(SAMPLES)
        ]
        self.offset = 0

    def get_next(self, keys):
        self.offset += 1
        return {key: self.columns[self.offset - 1][key] for key in keys}


def forward_step(data_iterator, model):
    batch = data_iterator.get_next(["tokens", "total_lengths", "rewards"])
    length = batch["tokens"].shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    output = model(batch["tokens"], torch.arange(length)[None], mask, labels=None)
    return output, partial(loss, batch, len(SAMPLES))


def loss(batch, num_microbatches, logits, non_loss_data=False):
    """Minus the rewarded log-probability of each sample, as Megatron divides by the number of microbatches."""
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, batch["tokens"][..., None]).squeeze()
    of_samples = torch.stack([one.mean() for one in chosen.split(batch["total_lengths"])])
    if non_loss_data:
        return of_samples.tolist()
    value = -batch["rewards"] * of_samples.mean() * num_microbatches
    return value, torch.tensor(1, dtype=torch.int), {"reward": batch["rewards"], "loss": float(value)}


def main():
    models = wrap_worker.begin(int(wrap_worker.sys.argv[1]))
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_epp

    for model in models:
        model.parallel_output = False
    readers = []
    wrap_worker.forward_step = forward_step
    wrap_worker.batches = lambda: readers.append(Reader()) or readers[-1]
    stock, planned = get_forward_backward_func(), megatron_epp.wrap()
    wanted = wrap_worker.run(stock, models)
    for _ in range(RUNS):
        readers.clear()
        found = wrap_worker.run(planned, models)
        worst = max(
            float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
            for ours, theirs in zip(found[1], wanted[1], strict=True)
        )
        told = {"worst": worst, "results": found[0], "stock": wanted[0], "offsets": [reader.offset for reader in readers]}
        record_figures({"rank": dist.get_rank()} | told)
    with torch.no_grad():
        ours, theirs = (wrap_worker.run(one, models, forward_only=True, collect=True)[0] for one in (planned, stock))
    record_figures({"rank": dist.get_rank(), "samples": ours, "samples by stock": theirs})


if __name__ == "__main__":
    main()
