"""Jobs of `test_sample_routes.py`: samples with routes in slices, and whole by Megatron's own replay of the same routes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.mcore.jobs.data_parallel import DataParallel
from tests.support.mcore.jobs.frameworks import apart, begin, outputs, refusal

LENGTHS = (40, 10, 24, 4, 18, 56)
"""Positions of the samples; two replicas have three each."""
EXPERTS, PER_TOKEN, LAYERS = 8, 2, 4
SETTINGS = {"slices": 3, "wait_limit_seconds": 60}
MODEL = {
    "num_experts": EXPERTS,
    "moe_router_topk": PER_TOKEN,
    "moe_ffn_hidden_size": 16,
    "add_bias_linear": False,
    "moe_enable_routing_replay": True,
    "moe_router_load_balancing_type": "none",
    "calculate_per_token_loss": True,
}


def made(layers: int = LAYERS) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(4)
    return [
        {
            "tokens": torch.randint(64, (length + 1,), generator=random),
            "trained": (torch.rand(length + 1, generator=random) < 0.7).int() | (torch.arange(length + 1) == length).int(),
            "routes": torch.rand(length + 1, layers, EXPERTS, generator=random).argsort(dim=2)[..., :PER_TOKEN],
        }
        for length in LENGTHS
    ]


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "router_replay", None) is not None]


def whole_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    """Run a sample whole. Its routers replay its routes, if it has some."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    sample = next(data)
    tokens, mask = sample["tokens"][None], sample["trained"][1:].float()
    own = slice(0, None)
    if model.config.sequence_parallel:
        size = mask.numel() // parallel_state.get_tensor_model_parallel_world_size()
        own = slice(first := size * parallel_state.get_tensor_model_parallel_rank(), first + size)
    for router in routers(model) if "routes" in sample else ():
        router.router_replay.set_target_indices(sample["routes"][:-1][own, router.number])
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    losses = outputs(model, tokens[:, :-1], tokens[:, 1:])
    for router in routers(model):
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()
    return losses, lambda output: ((output[0] * mask).sum(), mask.sum().int(), {"loss": (output[0] * mask).sum().detach()})


def biases(training: DataParallel) -> list[Tensor]:
    """Return the biases of experts, which gradients' end moves by the tokens of each, and put them back."""
    found = []
    for router in chain.from_iterable(routers(chunk) for chunk in training.chunks):
        if router.expert_bias is not None:
            found.append(router.expert_bias.clone())
            router.expert_bias.zero_()
    return found


def _read(folder: Path, stages: Iterable[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor], float]:
    """Return what ranks of one stage each have written, for a rank with several stages."""
    weights, gradients, of_experts, losses = zip(*(torch.load(Path(folder, f"{stage}.pt")) for stage in stages), strict=True)
    return [*chain(*weights)], [*chain(*gradients)], [*chain(*of_experts)], sum(losses)


def replayed(
    replicas: int = 1,
    stages: int | None = None,
    plans: Mapping[str, Any] | None = None,
    all_layers: bool = False,
    written: Path | None = None,
    read: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return how far slices that replay routes are from whole samples that do, by Megatron's schedule and replay.

    Args:
        replicas, stages, settings: as of `begin`.
        plans: more settings of `wrap_samples`.
        all_layers: samples have routes of layers without experts, too, which no one reads.
        written: folder for what Megatron's schedule does, for a job with ranks that it does not know.
        read: folder from which that is read.
    """
    loop = begin(LENGTHS, stages, replicas=replicas, **MODEL | settings)
    from megatron.core import parallel_state

    import megatron_epp

    rank, ranks = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    numbers = [router.layer_number for router in chain.from_iterable(map(routers, loop.models))]
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, numbers)
    layers = sorted({*chain(*of_ranks)})
    for router in chain.from_iterable(map(routers, loop.models)):
        router.number = router.layer_number - 1 if all_layers else layers.index(router.layer_number)
    samples = made(loop.models[0].config.num_layers if all_layers else len(layers))
    training = DataParallel(loop, samples, whole_step)
    if read is not None:
        start, expected, of_experts, loss = _read(read, range(rank, stages or ranks, ranks))
        training.load(start)
    else:
        start = training.weights()
        expected, results = training.whole()
        of_experts, loss = biases(training), sum(float(one["loss"]) for one in results)
    if written is not None:
        torch.save((start, expected, of_experts, loss), Path(written, f"{rank}.pt"))
    schedule = megatron_epp.wrap_samples(**SETTINGS | dict(plans or {}))
    chosen, _ = training.sliced(schedule, [{key: x for key, x in one.items() if key != "routes"} for one in samples])
    biases(training)
    calls = [0]
    hooks = [router.register_forward_hook(partial(_count, calls)) for chunk in training.chunks for router in routers(chunk)]
    gradients, report = training.sliced(schedule)
    found = biases(training)
    for hook in hooks:
        hook.remove()
    evaluated = schedule(model=training.chunks, samples=samples, forward_only=True)
    schedule.close()
    return {
        "worst": apart(gradients, expected),
        "biases": apart(found, of_experts),
        "num_biases": len(of_experts),
        "chosen": apart(chosen, expected),
        "losses": [one.means["next token"] * one.divisor for one in (report, evaluated)],
        "expected": loss,
        "replica": parallel_state.get_data_parallel_rank(),
        "chunks": report.num_chunks,
        "layers": len(layers),
        "again": calls[0] - len(hooks) * report.num_chunks,
    }


def _count(calls: list[int], *_: Any) -> None:
    calls[0] += 1
