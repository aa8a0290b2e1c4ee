"""An update of a batch with a long response, in slices under a cap and whole by verl's engine."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from megatron_epp.losses import Average, ClippedRatio
from megatron_epp.mcore import entry
from megatron_epp.runtime.autograd.saved import SavedTensors
from scripts.demo_rl import engine as verl

SIZE = verl.Size(layers=4, hidden=64, heads=4, vocabulary=256, longest=512, budget=512)
SAMPLES, MEDIAN = 12, 0.07
"""Number of samples, and the median of responses as a share of the longest."""
BELOW = 0.95
"""Cap on activations, as a multiple of what 1F1B holds with all but one layer of a stage recomputed: it must recompute all."""
LEARNING = 8
"""Updates before the one that is compared: costs are learnt from six, and the next run by these plans."""


def updated() -> dict[str, Any]:
    """Update whole and in slices; return bytes that both hold, their losses, the norm of the difference of gradients over
    theirs, and what refuses a sample that is longer than the token budget.
    """
    entry.prepare()
    dist.init_process_group("gloo")
    logging.getLogger("verl").setLevel(logging.WARNING)
    updates, layers = Updates(), SIZE.layers // SIZE.stages
    held = {recomputed: _peak_bytes(updates, partial(updates.whole, recomputed))[0] for recomputed in (layers, layers - 1, 0)}
    cap_bytes, refusal = int(BELOW * held[layers - 1]), ""
    try:
        updates.whole(layers, SIZE.budget // 2)
    except (AssertionError, ValueError) as error:
        refusal = str(error)
    cap_gb = (cap_bytes + _static_bytes(updates)) / 2**30
    train = megatron_epp.wrap_samples(loss=updates.loss, memory_cap_gb=cap_gb, costs="learn")
    for _ in range(LEARNING):
        updates.sliced(train)
    whole, own = updates.whole(layers), updates.gradients()
    sliced_bytes, in_slices = _peak_bytes(updates, partial(updates.sliced, train))
    differing = updates.gradients() - own
    train.close()
    return {
        "held_bytes": held,
        "cap_bytes": cap_bytes,
        "sliced_bytes": sliced_bytes,
        "refusal": refusal,
        "losses": (whole, in_slices),
        "gradients": float(differing.norm() / own.norm()),
    }


class Updates:
    """Updates of one model, whole by verl's engine, and in slices: one response is as long as the context."""

    def __init__(self) -> None:
        self.samples = verl.drawn(SAMPLES, SIZE.longest // 2, SIZE.vocabulary, seed=3, median=MEDIAN * SIZE.longest)
        random = torch.Generator().manual_seed(4)
        self.samples.tokens[SAMPLES // 2] = torch.randint(1, SIZE.vocabulary, (SIZE.longest,), generator=random)
        uniform, lengths = -math.log(SIZE.vocabulary), self.samples.lengths
        self.samples.old_logprobs = [uniform + 0.2 * torch.randn(n - verl.PROMPT, generator=random) for n in lengths]
        self._engine = verl.verl_engine(SIZE)
        self._engine.optimizer = verl.GradientsKept()
        self.model = self._engine.module[0]
        self.loss = ClippedRatio(average=Average.SEQUENCE_MEANS, clip_negative=3.0)  # verl's defaults
        known = zip(self.samples.tokens, self.samples.advantages, self.samples.old_logprobs, strict=True)
        self.columns = [
            {
                "tokens": tokens,
                "trained": [0] * verl.PROMPT + [1] * (len(tokens) - verl.PROMPT),
                "advantages": advantage,
                "old_logprobs": torch.cat([torch.zeros(verl.PROMPT), old]),
            }
            for tokens, advantage, old in known
        ]

    def whole(self, recomputed: int, budget: int = SIZE.budget) -> float:
        """Update by whole microbatches; return the loss. Raises what the framework raises for too small a budget."""
        with _recomputing(self.model.config, recomputed):
            batch = verl.batch_of(self.samples, replace(SIZE, budget=budget), SAMPLES)
            metrics = self._engine.train_batch(batch, verl.ppo_loss(loss_agg_mode="seq-mean-token-mean"))
            loss = sum(metrics["loss"]) if metrics else 0.0
        return float(verl.from_last_stage(loss))

    def sliced(self, train: Any) -> float:
        self.model.zero_grad_buffer()
        return float(train(model=self.model, samples=self.columns).means[self.loss.name])

    def gradients(self) -> Tensor:
        return torch.cat([parameter.main_grad.flatten() for parameter in self.model.parameters()])


def _static_bytes(updates: Updates) -> int:
    """Return the bytes of weights, gradients and optimizer of the smaller stage, which a cap holds too."""
    probe = megatron_epp.wrap_samples(loss=updates.loss)
    probe(model=updates.model, samples=updates.columns, forward_only=True)
    least = min(stage.static_bytes for stage in probe._run.costs.stages)
    probe.close()
    return int(least)


def _peak_bytes(updates: Updates, update: Callable[[], float]) -> tuple[int, float]:
    with SavedTensors(updates.model.parameters()) as saved:
        loss = update()
    peak = torch.tensor([saved.peak_bytes])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak[0]), loss


@contextmanager
def _recomputing(config: Any, layers: int) -> Iterator[None]:
    if layers:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", layers
    try:
        yield
    finally:
        config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
