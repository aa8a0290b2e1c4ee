"""verl's own training step on its own engine: the same batches by Megatron's own schedule and by plans.

Jobs of `tests/callers/test_verl.py`. The frameworks' folder has to be there (`scripts.demo_rl.engine`).
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.mcore import entry
from scripts.demo_rl import engine as verl
from tests.support.mcore.jobs.frameworks import apart, with_fixed_times

SAMPLES = 16
"""Of a replica."""
US_PER_TOKEN = {"forward": 100.0, "backward": 200.0}
BATCHES = 4
"""Each is trained in microbatches of a token budget, and of `ROWS` samples, which are uneven; costs are learnt meanwhile."""
ROWS = 2
COMMON = 40
"""Tokens of the prompts of groups."""


def trained(stages: int, expert_parallel: int = 1, group: int = 1) -> dict[str, Any]:
    """Take training steps of verl by plans, which its plugin has installed, then by Megatron's own schedule, without an update.
    With several samples in a group, these begin with the same prompt of `COMMON` tokens.

    Returns for every batch the largest relative difference of gradients and of log-probabilities of samples, losses of
    microbatches by both, and the tokens of microbatches in the order in which both ran them; and whether costs are learnt.
    """
    entry.prepare()
    dist.init_process_group("gloo")
    shared = {"experts": 4, "expert_parallel": expert_parallel} if expert_parallel > 1 else {}
    size = verl.Size(stages=stages, **shared)
    if group > 1:
        verl.PROMPT = COMMON  # long enough to be shared
    with_fixed_times(US_PER_TOKEN)
    engine = verl.verl_engine(size)
    engine.optimizer = verl.GradientsKept()
    order = noted(engine)
    from megatron.core import parallel_state

    from megatron_epp.mcore.iteration.wrap import _installed, uninstall

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    loss = verl.ppo_loss(loss_agg_mode="seq-mean-token-mean", use_kl_loss=False)
    batches = []
    for seed in range(BATCHES):
        everything = verl.drawn(SAMPLES * replicas, size.budget, size.vocabulary, seed)
        own = everything.part(replica, replicas)
        batches.append(replace(own, tokens=[*verl.in_groups(own.tokens, group)]))
    was_installed = bool(_installed)

    def steps() -> list[dict[str, Any]]:
        taken = [step(engine, one, size, loss, replicas, order, rows) for one in batches for rows in (None, ROWS)]
        for each in taken if group > 1 else ():  # no loss reads log-probabilities of prompts
            each["logprobs"] = [own[COMMON - 1 :] for own in each["logprobs"]]
        return taken

    planned = steps()
    uninstall()
    compared = [compare(*pair) for pair in zip(planned, steps(), strict=True)]
    return {"rank": dist.get_rank(), "installed": was_installed, "batches": compared}


def step(engine: Any, samples: Any, size: Any, loss: Any, replicas: int, order: list[int], rows: int | None) -> dict[str, Any]:
    """Get old log-probabilities from verl's forward pass, moved a little, so that ratios are not 1, and take its step."""
    order.clear()
    found = verl.from_last_stage(verl.old_logprobs(engine, samples, size, SAMPLES * replicas))
    moved = [one + 0.3 * torch.sin(torch.arange(len(one))) for one in found]
    forward_order = list(order)
    order.clear()
    moved_samples = verl.Samples(samples.tokens, samples.advantages, moved)
    batch = verl.batch_of(moved_samples, size, SAMPLES * replicas, rows)
    with engine.train_mode():
        told = engine.train_batch(batch, loss)
        gradients = verl.gradients(engine)
    told = told or {"loss": [], "model_output": {}}
    logprobs = told["model_output"]["log_probs"].unbind() if told["model_output"] else []
    return {
        "gradients": gradients,
        "old": list(found),
        "logprobs": [one.detach() for one in logprobs],
        "losses": told["loss"],
        "order": list(order),
        "forward order": forward_order,
    }


def compare(planned: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    def difference(name: str) -> float:
        pairs: list[tuple[Tensor, Tensor]] = list(zip(planned[name], stock[name], strict=True))
        return max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)

    return {
        "gradients": apart(planned["gradients"], stock["gradients"]),
        "logprobs": difference("logprobs"),
        "old": difference("old"),
        "samples": len(planned["logprobs"]),
        **{name: (planned[name], stock[name]) for name in ("losses", "order", "forward order")},
    }


def noted(engine: Any) -> list[int]:
    """Return the list to which the engine's forward step adds the tokens of every microbatch from now on."""
    ran: list[int] = []
    step = engine.forward_step

    def forward_step(batch_iter: Any, model: Any, *rest: Any, **named: Any) -> Any:
        def items() -> Any:
            for batch in batch_iter:
                ran.append(int(batch["input_ids"].offsets()[-1]))
                yield batch

        return step(items(), model, *rest, **named)

    engine.forward_step = forward_step
    return ran
