"""Jobs of `test_samples.py`: a program with a loop of its own trains samples, whole by Megatron's schedule and in slices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.mcore.jobs.frameworks import apart, begin, outputs

LENGTHS = (40, 10, 24, 4, 18, 56)
"""Positions of the samples; all train, and two replicas have three each."""
SETTINGS = {"slices": 3, "wait_limit_seconds": 60}


def made() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate(LENGTHS):
        tokens = length + 1
        found.append(
            {
                "tokens": torch.randint(64, (tokens,), generator=random),
                "trained": (torch.rand(tokens, generator=random) < 0.7).int() | (torch.arange(tokens) == length).int(),
                "old_logprobs": -4 + 0.3 * torch.randn(tokens, generator=random),
                "reference_logprobs": (-4 + 0.3 * torch.randn(tokens, generator=random)).tolist(),
                "advantages": 1.0 - number / 2,
            }
        )
    found[3]["trained"] = (torch.arange(LENGTHS[3] + 1) == 2).int()  # one token alone
    return found


def whole_step(data: Any, model: Any, per_token: bool) -> tuple[Tensor, Any]:
    """Run a sample whole. Its loss is GRPO's with k3, written down in torch."""
    sample = next(data)
    tokens = sample["tokens"][None]
    losses = outputs(model, tokens[:, :-1], tokens[:, 1:])

    def loss_of(output: Tensor) -> tuple[Any, ...]:
        logprobs, mask = -output[0], sample["trained"][1:].float()
        ratio = (logprobs - sample["old_logprobs"][1:]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        each = -torch.minimum(ratio, clipped) if sample["advantages"] > 0 else torch.maximum(ratio, clipped)
        difference = torch.tensor(sample["reference_logprobs"])[1:] - logprobs
        each = each * abs(sample["advantages"]) + 0.1 * (difference.exp() - difference - 1)
        mean = (each * mask).sum() / mask.sum()
        kept = {"loss": mean.detach(), "logprobs": logprobs.detach().clone()}
        return (mean, torch.tensor(1), kept) if per_token else (mean, kept)

    return losses, loss_of


def grpo(
    replicas: int = 1,
    tensor_parallel: int = 1,
    stages: int | None = None,
    per_token: bool = True,
    part: str | None = None,
    plans: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return how far two trainings in slices are from one by Megatron's schedule, and a third by it afterwards.

    Args:
        replicas, tensor_parallel, stages, settings: as of `begin`.
        part: of the model that trains, as of `adapters.freeze`; None for all.
        plans: more settings of `wrap_samples`.
    """
    loop = begin(
        LENGTHS, stages, replicas=replicas, tensor_parallel=tensor_parallel, calculate_per_token_loss=per_token, **settings
    )
    if part is not None:
        from tests.support.mcore.adapters import freeze

        for model in loop.models:
            freeze(model, part)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_epp
    from megatron_epp.losses import Average, ClippedRatio

    samples, replica = made(), parallel_state.get_data_parallel_rank()
    mine = samples[replica::replicas]
    config = loop.models[0].config
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), bare) for bare in loop.models]
    config.finalize_model_grads_func = finalize_model_grads
    names = [sorted(chunk.state_dict()) for chunk in chunks]

    def gradients() -> list[Tensor]:
        return [p.main_grad.clone() for chunk in chunks for p in chunk.parameters() if p.requires_grad]

    def whole(forward_only: bool = False) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        several = len(chunks) > 1
        loop.forward_step, loop.models, loop.lengths = partial(whole_step, per_token=per_token), chunks, tuple(range(len(mine)))
        loop.batches = lambda: iter(mine)
        found = loop.call(get_forward_backward_func(), model=chunks if several else chunks[0], forward_only=forward_only)
        return gradients(), found

    expected, results = whole()
    loss = ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.1)
    schedule = megatron_epp.wrap_samples(loss=loss, **SETTINGS | dict(plans or {}))
    reports, worst = [], 0.0
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reports.append(schedule(model=chunks, samples=samples, wants_logprobs=True))
        worst = max(worst, apart(gradients(), expected))
    schedule.plan_ahead(model=chunks, samples=samples, forward_only=True)
    schedule.plan_ahead(model=chunks, samples=samples[:4])  # for a call that does not come
    evaluated = schedule(model=chunks, samples=samples, forward_only=True, wants_logprobs=True)
    left = len(schedule._ahead)
    schedule.close()
    afterwards, _ = whole()
    found = reports[0].logprobs[replica::replicas]
    return {
        "rank": dist.get_rank(),
        "worst": worst,
        "afterwards": apart(afterwards, expected),
        "losses": [report.means["policy loss"] for report in (*reports, evaluated)],
        "expected": [float(one["loss"]) for one in results],
        "logprobs": [
            float((torch.from_numpy(ours) - theirs["logprobs"] * sample["trained"][1:]).abs().max())
            for ours, theirs, sample in zip(found, results, mine, strict=False)
        ],
        "evaluated": max(float(abs(a - b).max()) for a, b in zip(reports[0].logprobs, evaluated.logprobs, strict=True)),
        "divisor": reports[0].divisor,
        "ahead": (left, len(schedule._ahead)),
        "chunks": reports[0].num_chunks,
        "num_gradients": len(expected),
        "names": names == [sorted(chunk.state_dict()) for chunk in chunks],
    }


def pairs(replicas: int = 1, per_token: bool = True, **settings: Any) -> dict[str, Any]:
    """Return how far the gradient of preferences is from a sum over tokens, weighted by what their pair's margin asks for."""
    loop = begin(LENGTHS, replicas=replicas, calculate_per_token_loss=per_token, **settings)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    import megatron_epp
    from megatron_epp.losses import Average, NextToken, Preference

    config = loop.models[0].config
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), bare) for bare in loop.models]
    config.finalize_model_grads_func = finalize_model_grads
    order = (0, 3, 1, 2, 4, 5)
    samples = [one | {"group": number // 2, "preferred": number % 2} for number, one in zip(order, made(), strict=True)]

    def trained(schedule: Any, given: Any) -> tuple[list[Tensor], Any]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        report = schedule(model=chunks, samples=given, wants_logprobs=True)
        return [p.main_grad.clone() for chunk in chunks for p in chunk.parameters()], report

    schedule = megatron_epp.wrap_samples(loss=Preference(beta=0.5), **SETTINGS)
    found, report = trained(schedule, samples)
    schedule.close()
    masks = [one["trained"][1:].float() for one in samples]
    given = zip(report.logprobs, masks, samples, strict=True)
    scores = [
        float(((torch.from_numpy(own) - torch.tensor(one["reference_logprobs"])[1:]) * mask).sum()) for own, mask, one in given
    ]
    margins = {one["group"]: 0.0 for one in samples}
    for score, one in zip(scores, samples, strict=True):
        margins[one["group"]] += score * (1 if one["preferred"] else -1)
    factor = {group: 0.5 / (1 + math.exp(0.5 * margin)) for group, margin in margins.items()}
    weighted = [one | {"weight": factor[one["group"]] * (1 if one["preferred"] else -1)} for one in samples]
    by_tokens = megatron_epp.wrap_samples(loss=NextToken(Average.SEQUENCES, "weight"), **SETTINGS)
    expected, _ = trained(by_tokens, weighted)
    loss = sum(math.log1p(math.exp(-0.5 * margin)) for margin in margins.values()) / len(margins)
    by_groups = len(samples) / len(margins)  # what divides the one and the other
    return {
        "worst": apart(found, [grad * by_groups for grad in expected]),
        "losses": (report.means["preference loss"], loss),
        "accuracy": (report.means["accuracy"], sum(margin > 0 for margin in margins.values()) / len(margins)),
        "divisor": report.divisor,
    }


def bad() -> dict[str, Any]:
    """Return what is said of samples that are wrong, and whether right ones train afterwards."""
    loop = begin(LENGTHS, calculate_per_token_loss=True)

    import megatron_epp
    from megatron_epp.losses import ClippedRatio, Preference
    from megatron_epp.plan import EppError

    schedule, samples = megatron_epp.wrap_samples(loss=ClippedRatio(), **SETTINGS), made()
    changes: dict[str, dict[str, Any]] = {
        "no column": {"advantages": None},
        "a column of another length": {"old_logprobs": [0.0, 0.0, 0.0]},
        "not finite": {"old_logprobs": float("nan")},
        "no tokens": {"tokens": [1]},
    }
    batches = {
        name: [samples[0], {key: value for key, value in (samples[1] | change).items() if value is not None}]
        for name, change in changes.items()
    }
    said = {}
    for name, batch in {**batches, "no samples": []}.items():
        try:
            schedule(model=loop.models, samples=batch)
        except EppError as error:
            said[name] = str(error)
    pairs = megatron_epp.wrap_samples(loss=Preference(), **SETTINGS)
    for name, group in {"no group": None, "one of a pair": 3}.items():
        try:
            pairs(model=loop.models, samples=[samples[0] | {"group": group, "preferred": 1}])
        except EppError as error:
            said[name] = str(error)
    pairs.close()
    unlike = {"unlike": {"advantages": 5.0}, "one rank's": {"old_logprobs": [1.0]}}
    for name, change in unlike.items():
        mine = [samples[0] | (change if dist.get_rank() == 1 else {}), *samples[1:]]
        try:
            schedule(model=loop.models, samples=mine)
        except EppError as error:
            said[name] = str(error)
    report = schedule(model=loop.models, samples=samples)
    try:
        schedule(model=[torch.nn.Linear(1, 1)], samples=samples)
    except EppError as error:
        said["another model"] = str(error)
    return {"said": said, "trains": report.divisor > 0}


def calls(replicas: int = 1, per_token: bool = True, distributed: bool = False, overlaps: bool = False) -> dict[str, Any]:
    """Return how far several calls are from one with all samples, what is said of calls that would be wrong, and of a loss that
    is not finite, and how far the call behind each is.
    """
    loop = begin(LENGTHS, replicas=replicas, calculate_per_token_loss=per_token)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    import megatron_epp
    from megatron_epp.losses import Average, ClippedRatio
    from megatron_epp.plan import EppError

    config, samples, said = loop.models[0].config, made(), {}
    own = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=overlaps)
    chunks = [DistributedDataParallel(config, own, bare) for bare in loop.models]
    if overlaps:  # as Megatron's training does
        (config.no_sync_func,), (config.grad_sync_func,) = zip(
            *((one.no_sync, one.start_grad_sync) for one in chunks), strict=True
        )
    config.finalize_model_grads_func = finalize_model_grads
    schedule = megatron_epp.wrap_samples(loss=ClippedRatio(average=Average.SEQUENCE_MEANS), **SETTINGS)

    def gradients(*batches: Any) -> list[Tensor]:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for number, batch in enumerate(batches, start=1):
            schedule(model=chunks, samples=batch, last=number == len(batches))
        if not distributed:
            return [p.main_grad.clone() for chunk in chunks for p in chunk.parameters()]
        whole = [(buffer.grad_data, buffer.data_parallel_group) for chunk in chunks for buffer in chunk.buffers]
        return [x.chunk(replicas)[dist.get_rank(group)].clone() for x, group in whole]  # the part that this replica steps

    def refused(name: str, batch: Any) -> None:
        try:
            schedule(model=chunks, samples=batch)
        except EppError as error:
            said[name] = str(error)

    untrained = [one | {"trained": 0} for one in samples[:2]]
    no_advantage = [one | {"advantages": 0.0} for one in samples[:2]]
    whole_without = gradients([*no_advantage, *samples[2:]])
    whole = gradients(samples)
    refused("finished", samples)
    found = {
        "after a refusal": gradients(samples),
        "two": gradients(samples[:3], samples[3:]),
        "three": gradients(samples[:2], samples[2:4], samples[4:]),
        "one without trained tokens": gradients(samples, untrained),
        "one without trained tokens before": gradients(untrained, samples),
    }
    for chunk in chunks:
        chunk.zero_grad_buffer()
    if replicas > 1:
        refused("too few", samples[:1])
    schedule(model=chunks, samples=samples[:3], last=False)  # given up
    found["given up"] = gradients(samples)
    old = samples[2]["old_logprobs"].clone()
    old[17] = -1e4
    stale = [one | ({"advantages": -1.0, "old_logprobs": old, "trained": 1} if one is samples[2] else {}) for one in samples]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    refused("overflow", stale)
    left = sum(float(p.main_grad.abs().sum()) for chunk in chunks for p in chunk.parameters())
    found["after an overflow"] = gradients(samples)
    away = {name: apart(one, whole) for name, one in found.items()}
    away["one whose gradients are 0 before"] = apart(gradients(no_advantage, samples[2:]), whole_without)
    schedule.close()
    return {"apart": away, "said": said, "left": left}


def refusals() -> dict[str, str]:
    """Return what is said of models, settings and losses that cannot be honoured."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    loop = begin(LENGTHS, calculate_per_token_loss=True, **recompute)
    from megatron.core.transformer.enums import AttnMaskType

    import megatron_epp
    from megatron_epp.plan import EppError

    def refused(samples: Any = None, **settings: Any) -> str:
        try:
            schedule = megatron_epp.wrap_samples(**settings)
            schedule(model=loop.models, samples=samples)
        except EppError as error:
            return str(error)
        return ""

    said = {
        "recompute": refused(made()),
        "settings": refused(slice=3),
        "choices": refused(offload="sometimes"),
        "loss": refused(loss="megatron_epp.losses:Clipped"),
        "no loss": refused(loss="tests.support.mcore.own_losses:NoLoss"),
    }
    config = loop.models[0].config
    config.recompute_granularity, config.attention_dropout = None, 0.1
    said["dropout of attention"] = refused(made())
    attention = loop.models[0].decoder.layers[0].self_attention
    config.attention_dropout, attention.attn_mask_type = 0.0, AttnMaskType.no_mask
    said["no mask"] = refused(made())
    attention.attn_mask_type = AttnMaskType.causal
    config.num_moe_experts, config.moe_z_loss_coeff = 4, 1e-3
    said["routers by tokens"] = refused(made(), loss="megatron_epp.losses:SequenceRatio")
    config.calculate_per_token_loss = False
    return said | {"routers by microbatches": refused(made())}
