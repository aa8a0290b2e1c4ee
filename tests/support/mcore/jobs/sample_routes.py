"""Jobs of `test_losses_in_training.py`: samples with routes in slices, and whole by Megatron's replay of the same routes."""

import re
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatron_epp
from tests.support.mcore.jobs.data_parallel import DataParallel
from tests.support.mcore.jobs.frameworks import apart, begin, outputs, refusal
from tests.support.mcore.jobs.samples import LENGTHS, SETTINGS

EXPERTS, PER_TOKEN, LAYERS = 8, 2, 4
MODEL = {
    "num_experts": EXPERTS, "moe_router_topk": PER_TOKEN, "moe_ffn_hidden_size": 16, "add_bias_linear": False,
    "moe_enable_routing_replay": True, "moe_router_load_balancing_type": "none", "calculate_per_token_loss": True,
}  # fmt: skip


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


def names(training: DataParallel) -> list[str]:
    found = []
    for chunk in training.chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.module.decoder.layers]
        for name, _ in chunk.module.named_parameters():
            found.append(re.sub(r"(?<=layers\.)\d+", lambda at: str(numbers[int(at[0])]), name, count=1))  # noqa: B023
    return found


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
        all_layers: samples have routes of layers without experts, too, which no one reads.
        written, read: file for what Megatron's schedule does on one rank, and in the place of a run by it.
    """
    loop = begin(LENGTHS, stages, replicas=replicas, **MODEL | settings)
    from megatron.core import parallel_state

    numbers = [router.layer_number for router in chain.from_iterable(map(routers, loop.models))]
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, numbers)
    layers = sorted({*chain(*of_ranks)})
    for router in chain.from_iterable(map(routers, loop.models)):
        router.number = router.layer_number - 1 if all_layers else layers.index(router.layer_number)
    samples = made(loop.models[0].config.num_layers if all_layers else len(layers))
    training = DataParallel(loop, samples, whole_step)
    if read is not None:
        weights, gradients, loss = torch.load(read)
        training.load([weights[name] for name in names(training)])
        expected, of_experts = [gradients[name] for name in names(training)], []
    else:
        start = training.weights()
        expected, results = training.whole()
        of_experts, loss = biases(training), sum(float(one["loss"]) for one in results)
    if written is not None:
        by_name = (dict(zip(names(training), tensors, strict=True)) for tensors in (start, expected))
        torch.save((*by_name, loss), written)
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


def refusals() -> dict[str, str]:
    """Return what is said of routes that cannot be replayed, and whether right ones train afterwards."""
    (model,), right, said = begin(LENGTHS, **MODEL).models, made(), {}
    first, *others = right
    schedule = megatron_epp.wrap_samples(**SETTINGS)

    def told(name: str, samples: Any, schedule: Any = schedule) -> None:
        said[name] = refusal(lambda: schedule(model=model, samples=samples)) or "trains"
        model.zero_grad()

    routes = first["routes"]
    told("missing in one", [*others, {key: value for key, value in first.items() if key != "routes"}])
    told("too few layers", [first | {"routes": routes[:, :3]}, *others])
    told("one expert of a token", [first | {"routes": routes[..., :1]}, *others])
    told("too few tokens", [first | {"routes": routes[:30]}, *others])
    told("no such expert", [first | {"routes": torch.where(routes == 7, 8, routes)}, *others])
    told("an expert twice", [first | {"routes": torch.zeros_like(routes)}, *others])
    told("no numbers", [first | {"routes": routes.float()}, *others])
    told("one rank's", [first | {"routes": routes.flip(2) if torch.distributed.get_rank() else routes}, *others])
    told("right", right)
    told("without the last token's", [one | {"routes": one["routes"][:-1].numpy()} for one in right])
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    told("recorded by Megatron", [{key: value for key, value in one.items() if key != "routes"} for one in right])
    RouterReplay.clear_global_router_replay_action()
    model.config.moe_router_load_balancing_type = "sinkhorn"
    told("sinkhorn", right, megatron_epp.wrap_samples(**SETTINGS))
    return said
