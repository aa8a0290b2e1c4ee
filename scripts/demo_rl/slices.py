"""One rank of the second part: a batch with a long response by Megatron's 1F1B, which recomputes every layer, and in slices."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.contrib.demos.rounds import turns
from megatron_epp.mcore.pinned import pin
from megatron_epp.runtime.autograd.saved import SavedTensors
from scripts.demo_rl import engine as verl
from scripts.demo_rl.imitation import CLIP_NEGATIVE, Imitation, by_budget

SIZE = verl.Size(layers=8, hidden=128, heads=4, vocabulary=256, longest=4096, budget=4096)
REDUCED = replace(SIZE, layers=4, hidden=64, longest=512, budget=512)
"""Sizes that only show that it runs."""
SAMPLES, MEDIAN = 12, 0.07
"""Number of samples, and the median of responses as a share of the longest."""
BELOW = 0.95
"""Cap on activations, as a multiple of what 1F1B holds with all but one layer of a stage recomputed: it must recompute all."""
LEARNING = 8
"""Updates before the first that counts: costs are learnt from six, and the next run by these plans."""
LEARNT = "learnt"
"""Name of the costs by then."""
STOCK, SLICES = "1F1B, every layer recomputed", "slices"


def batch(size: verl.Size) -> verl.Samples:
    """Draw the batch: log-normal lengths, and one response as long as the model's context."""
    samples = verl.drawn(SAMPLES, size.longest // 2, size.vocabulary, seed=3, median=MEDIAN * size.longest)
    random = torch.Generator().manual_seed(4)
    samples.tokens[SAMPLES // 2] = torch.randint(1, size.vocabulary, (size.longest,), generator=random)
    uniform = -math.log(size.vocabulary)
    samples.old_logprobs = [uniform + 0.2 * torch.randn(length - verl.PROMPT, generator=random) for length in samples.lengths]
    return samples


class Updates:
    """Updates of one model, by verl's engine or its imitation and in slices."""

    def __init__(self, has_verl: bool, size: verl.Size = SIZE) -> None:
        from megatron_epp.losses import Average, ClippedRatio

        self.size, self.samples, self._engine = size, batch(size), None
        if has_verl:
            self._engine = verl.verl_engine(size)
            self._engine.optimizer = verl.GradientsKept()
            self._loss = verl.ppo_loss(loss_agg_mode="seq-mean-token-mean")
        self._imitation = None if has_verl else Imitation(size)
        self.model = (self._engine or self._imitation).module[0]
        self.loss = ClippedRatio(average=Average.SEQUENCE_MEANS, clip_negative=CLIP_NEGATIVE)
        self.columns = [
            {
                "tokens": tokens,
                "trained": [0] * verl.PROMPT + [1] * (len(tokens) - verl.PROMPT),
                "advantages": advantage,
                "old_logprobs": torch.cat([torch.zeros(verl.PROMPT), old]),
            }
            for tokens, advantage, old in zip(
                self.samples.tokens, self.samples.advantages, self.samples.old_logprobs, strict=True
            )
        ]

    def whole(self, recomputed: int, budget: int | None = None) -> float:
        """Update by whole microbatches; return the loss. Raises what the framework raises for too small a budget."""
        budget = budget or self.size.budget
        with _recomputing(self.model.config, recomputed):
            if self._imitation is not None:
                return _shared(self._imitation.update(self.samples, budget))
            assert self._engine is not None
            batch = verl.batch_of(self.samples, replace(self.size, budget=budget), SAMPLES)
            metrics = self._engine.train_batch(batch, self._loss)
            return _shared(sum(metrics["loss"]) if metrics else 0.0)

    def sliced(self, train: Any) -> float:
        """Update in slices; return the loss."""
        self.model.zero_grad_buffer()
        return float(train(model=self.model, samples=self.columns).means[self.loss.name])

    def gradients(self) -> torch.Tensor:
        """Copy this rank's gradients."""
        return torch.cat([parameter.main_grad.flatten() for parameter in self.model.parameters()])


def main() -> None:
    folder, (rounds, has_verl, longest) = Path(sys.argv[1]), map(int, sys.argv[2:])
    pin(int(os.environ["LOCAL_RANK"]))
    from megatron_epp.mcore import entry

    entry.prepare()
    dist.init_process_group("gloo")
    for name in ("megatron_epp", "verl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    size = REDUCED if longest == REDUCED.longest else SIZE
    torch.save(measured(Updates(bool(has_verl), size), rounds), folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


def measured(updates: Updates, rounds: int) -> dict[str, Any]:
    """Measure both ways in turn, after costs have been learnt; return times, bytes, differences and plans."""
    import megatron_epp

    size = updates.size
    layers = size.layers // size.stages
    held = {}
    for recomputed in (layers, layers - 1, 0):
        held[recomputed], _ = _peak_bytes(updates, lambda: updates.whole(recomputed))  # noqa: B023
    cap_bytes = int(BELOW * held[layers - 1])
    refusal = ""
    try:
        updates.whole(layers, size.budget // 2)
    except (AssertionError, ValueError) as error:
        refusal = str(error)
    cap_gb = (cap_bytes + _static_bytes(updates)) / 2**30
    train = megatron_epp.wrap_samples(loss=updates.loss, memory_cap_gb=cap_gb, costs="learn")
    for _ in range(LEARNING):
        updates.sliced(train)
    planned = _plans(updates, train._run)
    assert planned[1].costs == LEARNT, planned[1].costs
    loss, own = updates.whole(layers), updates.gradients()
    peak, in_slices = _peak_bytes(updates, lambda: updates.sliced(train))
    theirs = updates.gradients()
    times: dict[str, list[float]] = {STOCK: [], SLICES: []}
    run: dict[str, Callable[[], float]] = {STOCK: lambda: updates.whole(layers), SLICES: lambda: updates.sliced(train)}
    for order in turns((STOCK, SLICES), rounds):
        for name in order:
            dist.barrier()
            start_s = time.perf_counter()
            run[name]()
            dist.barrier()
            times[name].append(time.perf_counter() - start_s)
    train.close()
    from megatron_epp.plan.serialize import to_json

    return {
        "times_s": times,
        "held_bytes": held,
        "cap_bytes": cap_bytes,
        "sliced_bytes": peak,
        "refusal": refusal,
        "losses": (loss, in_slices),
        "gradients": float((theirs - own).norm() / own.norm()),
        "plans": [to_json(plan) for plan in planned],
    }


def _plans(updates: Updates, run: Any) -> tuple[Any, Any]:
    """Plan the batch by the costs that were learnt: verl's microbatches in 1F1B with every layer recomputed, and slices."""
    from megatron_epp.mcore.arguments.parser import options_from
    from megatron_epp.planner import Options, plan
    from megatron_epp.planner.microbatches import plan_as_given

    lengths, costs = updates.samples.lengths, run.costs
    rows = by_budget(lengths, updates.size.budget)
    microbatches = tuple(tuple(lengths[number] for number in row) for row in rows)
    whole = plan_as_given(microbatches, run.problem, costs, Options(recompute=updates.size.layers // updates.size.stages)).plan
    tokens = tuple(length - 1 for length in lengths)  # the last token of a sample is only a label
    return whole, plan(replace(run.problem, lengths=tokens), costs, options_from(run.args, training=True))


def _static_bytes(updates: Updates) -> int:
    """Return the bytes of weights, gradients and optimizer of the smaller stage, which a cap holds too."""
    import megatron_epp

    probe = megatron_epp.wrap_samples(loss=updates.loss)
    probe(model=updates.model, samples=updates.columns, forward_only=True)
    least = min(stage.static_bytes for stage in probe._run.costs.stages)
    probe.close()
    return int(least)


def _peak_bytes(updates: Updates, update: Callable[[], float]) -> tuple[int, float]:
    """Return the most bytes that autograd holds on any rank during an update, and the loss."""
    with SavedTensors(updates.model.parameters()) as saved:
        loss = update()
    peak = torch.tensor([saved.peak_bytes])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak[0]), loss


def _shared(mine: float) -> float:
    """Return the loss of the last stage on all ranks."""
    return float(verl.from_last_stage(mine))


@contextmanager
def _recomputing(config: Any, layers: int) -> Iterator[None]:
    """Return a context in which Megatron recomputes so many layers of a stage."""
    if layers:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", layers
    try:
        yield
    finally:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None


if __name__ == "__main__":
    main()
