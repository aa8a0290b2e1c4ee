"""One rank of the demonstration: steps of GRPO by verl's engine with Megatron's Adam. Plans are switched on by an environment
variable, and this program knows nothing of them.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scripts.demo_rl import engine as verl

GROUPS, RESPONSES, PARTS = 8, 4, 2
"""Prompts of a step, responses to each, and updates of a step."""
LEARNING_RATE = 1e-3
SURPRISE = 0.01
"""Weight of a response's mean log-probability in its reward, by which rewards show what the weights are."""


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    from megatron_epp.mcore import entry

    entry.prepare()
    dist.init_process_group("gloo")
    size = verl.Size()
    engine = verl.with_optimizer(verl.verl_engine(size), LEARNING_RATE)
    logging.getLogger("megatron_epp.mcore.patches").setLevel(logging.WARNING)
    loss = verl.ppo_loss(loss_agg_mode="seq-mean-token-mean")
    record: dict[str, Any] = {"rewards": [], "losses": []}
    for step in range(steps):
        rewards, losses = _step(engine, size, loss, step)
        record["rewards"].append(rewards)
        record["losses"].append(losses)
    weights = [parameter.detach().clone() for model in engine.module for parameter in model.parameters()]
    torch.save(record | {"weights": weights}, folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()


def _step(engine: Any, size: verl.Size, loss: Any, step: int) -> tuple[list[float], list[float]]:
    """Take a step of GRPO; return the rewards of all responses of this replica, and the loss of each update."""
    from megatron.core import parallel_state

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    count = GROUPS * RESPONSES
    mine = rollout(size, step).part(replica, replicas)
    old = verl.from_last_stage(verl.old_logprobs(engine, mine, size, count))
    evenness = [(tokens[verl.PROMPT :] % 2 == 0).float().mean() for tokens in mine.tokens]
    rewards = torch.tensor([float(even + SURPRISE * own.mean()) for even, own in zip(evenness, old, strict=True)])
    groups = rewards.view(-1, RESPONSES)
    # A replica has whole groups, by the order in which `rollout` lists responses.
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    known = verl.Samples(mine.tokens, advantages.flatten().tolist(), list(old))
    losses = []
    for part in range(PARTS):
        batch = verl.batch_of(known.part(part, PARTS), size, count // PARTS)
        with engine.train_mode():
            metrics = engine.train_batch(batch, loss)
        losses.append(sum(metrics["loss"]) if metrics else 0.0)
    return rewards.tolist(), losses


def rollout(size: verl.Size, step: int) -> verl.Samples:
    """Draw the responses of a step, in place of an engine that generates: of random tokens and log-normal lengths.

    The samples of a group belong to one replica: two groups take turns.
    """
    drawn = verl.drawn(GROUPS * RESPONSES, size.budget, size.vocabulary, seed=step)
    for number in range(len(drawn.tokens)):
        group = number % 2 + number // (2 * RESPONSES) * 2
        random = torch.Generator().manual_seed(1000 * step + group)
        drawn.tokens[number][: verl.PROMPT] = torch.randint(1, size.vocabulary, (verl.PROMPT,), generator=random)
    return drawn


if __name__ == "__main__":
    logging.getLogger("verl").setLevel(logging.ERROR)
    main()
