"""Jobs of `test_samples.py`: samples trained in slices and whole, on values of a head, and by a teacher's probabilities."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from megatron_epp.features.cascade import common_rows, tree_cascade
from megatron_epp.losses import Average, ClippedRatio, ClippedValue, Distillation, NextToken, Preference
from tests.support.mcore.jobs.data_parallel import DataParallel
from tests.support.mcore.jobs.frameworks import apart, begin, outputs, refusal

LENGTHS = (40, 10, 24, 4, 18, 56)
"""Positions of the samples; all train, and two replicas have three each."""
SIBLINGS = (40, 44, 48, 4, 50, 56)
"""Lengths of samples of which all but the shortest begin alike."""
CAP_BYTES = 180_000
"""Cap on a rank's memory that is too low for the longest samples, and leaves room for the others."""
SETTINGS = {"slices": 3, "wait_limit_seconds": 60}


def made(prompt: int = 0, lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Samples; those of more than `prompt` tokens begin with as many equal ones, which are not trained."""
    random = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate(lengths):
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
    for sample in found if prompt else ():
        if len(sample["tokens"]) > prompt + 1:
            sample["tokens"][:prompt] = found[0]["tokens"][:prompt]
            sample["trained"][:prompt] = 0
    found[3]["trained"] = (torch.arange(lengths[3] + 1) == 2).int()  # one token alone
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
    prompt: int = 0,
    lengths: Sequence[int] = LENGTHS,
    **settings: Any,
) -> dict[str, Any]:
    """Return how far two trainings in slices are from one by Megatron's schedule, and a third by it afterwards. Of the model a
    part of `adapters.freeze` trains, or all. `plans` are more settings of `wrap_samples`.
    """
    settings |= {"replicas": replicas, "tensor_parallel": tensor_parallel, "calculate_per_token_loss": per_token}
    loop = begin(lengths, stages, **settings)
    if part is not None:
        from tests.support.mcore.adapters import freeze

        for model in loop.models:
            freeze(model, part)
    from megatron.core import parallel_state

    samples = made(prompt, lengths)
    training = DataParallel(loop, samples, partial(whole_step, per_token=per_token))
    chunks = training.chunks
    names = [sorted(chunk.state_dict()) for chunk in chunks]
    expected, results = training.whole()
    loss = ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.1)
    schedule = megatron_epp.wrap_samples(loss=loss, **SETTINGS | dict(plans or {}))
    gradients, reports = zip(*(training.sliced(schedule, wants_logprobs=True) for _ in range(2)), strict=True)
    schedule.plan_ahead(model=chunks, samples=samples, forward_only=True)
    schedule.plan_ahead(model=chunks, samples=samples[:4])  # for a call that does not come
    evaluated = schedule(model=chunks, samples=samples, forward_only=True, wants_logprobs=True)
    left = len(schedule._ahead)
    splits = {stage.weights is not None for stage in schedule._run.stages.values()}
    schedule.close()
    afterwards, _ = training.whole()
    found = reports[0].logprobs[parallel_state.get_data_parallel_rank() :: replicas]
    return {
        "rank": dist.get_rank(),
        "worst": max(apart(each, expected) for each in gradients),
        "afterwards": apart(afterwards, expected),
        "losses": [report.means["policy loss"] for report in (*reports, evaluated)],
        "expected": [float(one["loss"]) for one in results],
        "logprobs": [
            float((torch.from_numpy(ours) - theirs["logprobs"] * sample["trained"][1:]).abs().max())
            for ours, theirs, sample in zip(found, results, training.mine, strict=False)
        ],
        "evaluated": max(float(abs(a - b).max()) for a, b in zip(reports[0].logprobs, evaluated.logprobs, strict=True)),
        "divisor": reports[0].divisor,
        "ahead": (left, len(schedule._ahead)),
        "chunks": reports[0].num_chunks,
        "shared": reports[0].num_shared_tokens,
        "splits": sorted(splits),
        "num_gradients": len(expected),
        "names": names == [sorted(chunk.state_dict()) for chunk in chunks],
    }


def siblings(**settings: Any) -> dict[str, Any]:
    """Return what `grpo` does of five samples of one prompt, all of whose rows in common are read at once; and these calls."""
    at_once = patch.object(tree_cascade, "cascaded", wraps=tree_cascade.cascaded)
    with at_once as calls, patch.multiple(common_rows, LEAST_ROWS=0, ROWS_PER_TOKEN=0):
        found = grpo(prompt=36, lengths=SIBLINGS, plans={"share_prefixes": True}, **settings)
    return found | {"at_once": calls.call_count}


def steps(prompt: int, count: int = 20, stages: int | None = None, **settings: Any) -> dict[str, Any]:
    """Return losses of steps with a shared prompt and of whole samples, and how far the weights are from each other at the end.

    Where ranks have several stages samples by themselves stand for whole ones, whose lengths Megatron's schedule cannot run.
    """
    loop = begin(LENGTHS, stages, calculate_per_token_loss=True, **settings)
    samples = made(prompt)
    training = DataParallel(loop, samples, partial(whole_step, per_token=True))
    loss = ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.1)
    shared, alone = (megatron_epp.wrap_samples(loss=loss, share_prefixes=shares, **SETTINGS) for shares in (True, False))
    beginning = training.weights()

    def trained(step: Callable[[], list[float]]) -> tuple[list[Tensor], list[list[float]]]:
        training.load(beginning)
        losses = []
        for _ in range(count):
            losses.append(step())
            training.step()
        return training.weights(), losses

    def by(schedule: Any) -> list[float]:
        return [float(training.sliced(schedule)[1].means["policy loss"])]

    def whole() -> list[float]:
        return [float(one["loss"]) for one in training.whole()[1]]

    weights, losses = trained(partial(by, shared))
    others, expected = trained(whole if stages is None else partial(by, alone))
    return {
        "worst": apart(weights, others),
        "moved": apart(others, beginning),
        "losses": losses,
        "expected": expected,
        "stages": len(shared._run.stages),
    }


def unshared(**settings: Any) -> dict[str, Any]:
    """Return what is said where samples are to share and the model cannot."""
    loop = begin(LENGTHS, **settings)
    schedule = megatron_epp.wrap_samples(loss=ClippedRatio(), share_prefixes=True, **SETTINGS)
    return {"said": refusal(lambda: schedule(model=loop.models, samples=made()))}


def pairs(replicas: int = 1, per_token: bool = True, prompt: int = 0, **settings: Any) -> dict[str, Any]:
    """Return how far the gradient of preferences is from a sum over tokens, weighted by what their pair's margin asks for."""
    loop = begin(LENGTHS, replicas=replicas, calculate_per_token_loss=per_token, **settings)
    order = (0, 3, 1, 2, 4, 5)
    samples = [one | {"group": number // 2, "preferred": number % 2} for number, one in zip(order, made(prompt), strict=True)]
    training = DataParallel(loop, samples)
    schedule = megatron_epp.wrap_samples(loss=Preference(beta=0.5), share_prefixes=bool(prompt) or None, **SETTINGS)
    found, report = training.sliced(schedule, wants_logprobs=True)
    schedule.close()
    masks = [one["trained"][1:].float() for one in samples]
    references = [torch.tensor(one["reference_logprobs"])[1:] for one in samples]
    given = zip(report.logprobs, references, masks, strict=True)
    scores = [float(((torch.from_numpy(own) - reference) * mask).sum()) for own, reference, mask in given]
    margins = {one["group"]: 0.0 for one in samples}
    for score, one in zip(scores, samples, strict=True):
        margins[one["group"]] += score * (1 if one["preferred"] else -1)
    factor = {group: 0.5 / (1 + math.exp(0.5 * margin)) for group, margin in margins.items()}
    weighted = [one | {"weight": factor[one["group"]] * (1 if one["preferred"] else -1)} for one in samples]
    by_tokens = megatron_epp.wrap_samples(loss=NextToken(Average.SEQUENCES, "weight"), share_prefixes=False, **SETTINGS)
    expected, _ = training.sliced(by_tokens, weighted)
    loss = sum(math.log1p(math.exp(-0.5 * margin)) for margin in margins.values()) / len(margins)
    by_groups = len(samples) / len(margins)  # what divides the one and the other
    return {
        "worst": apart(found, [grad * by_groups for grad in expected]),
        "losses": (report.means["preference loss"], loss),
        "accuracy": (report.means["accuracy"], sum(margin > 0 for margin in margins.values()) / len(margins)),
        "divisor": report.divisor,
    }


def bad() -> dict[str, Any]:
    """Return what is said of samples and models that are wrong, or above a cap, and whether others train afterwards."""
    loop = begin(LENGTHS, calculate_per_token_loss=True)
    schedule, samples, said = megatron_epp.wrap_samples(loss=ClippedRatio(), **SETTINGS), made(), {}
    pairs = megatron_epp.wrap_samples(loss=Preference(), **SETTINGS)

    def refused(name: str, batch: Any, schedule: Any = schedule, model: Any = loop.models) -> None:
        said[name] = refusal(lambda: schedule(model=model, samples=batch))

    config = loop.models[0].config
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    refused("recompute", samples)
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    sharing = megatron_epp.wrap_samples(loss=ClippedRatio(), planner="seq1f1b", share_prefixes=True, **SETTINGS)
    refused("sharing by another planner", samples, sharing)
    refused("no column", [samples[0], {key: value for key, value in samples[1].items() if key != "advantages"}])
    refused("a column of another length", [samples[0], samples[1] | {"old_logprobs": [0.0, 0.0, 0.0]}])
    refused("not finite", [samples[0], samples[1] | {"old_logprobs": float("nan")}])
    refused("no tokens", [samples[0], samples[1] | {"tokens": [1]}])
    refused("no samples", [])
    for name, group in {"no group": None, "one of a pair": 3}.items():
        refused(name, [samples[0] | {"group": group, "preferred": 1}], pairs)
    pairs.close()
    for name, change in {"unlike": {"advantages": 5.0}, "one rank's": {"old_logprobs": [1.0]}}.items():
        refused(name, [samples[0] | (change if dist.get_rank() == 1 else {}), *samples[1:]])
    report = schedule(model=loop.models, samples=samples)
    refused("another model", samples, model=[torch.nn.Linear(1, 1)])
    logged = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_epp").addHandler(handler)
    schedule(model=loop.models, samples=[one | {"trained": 0} for one in samples])
    capped = megatron_epp.wrap_samples(loss=ClippedRatio(), memory_cap_gb=CAP_BYTES / 2**30, **SETTINGS)
    refused("too long for the cap", samples, capped)
    shorter = capped(model=loop.models, samples=samples[1:5])
    capped.close()
    parameters = [parameter for model in loop.models for parameter in model.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(False)
    schedule(model=loop.models, samples=samples)
    return {"said": said, "trains": min(report.divisor, shorter.divisor) > 0, "logged": logged, "rank": dist.get_rank()}


def calls(replicas: int = 1, per_token: bool = True, distributed: bool = False, overlaps: bool = False) -> dict[str, Any]:
    """Return how far several calls are from one with all samples, what is said of calls that would be wrong, and of a loss that
    is not finite, and how far the call behind each is.
    """
    loop = begin(LENGTHS, replicas=replicas, calculate_per_token_loss=per_token)
    samples, said = made(), {}
    training = DataParallel(loop, samples, overlaps=overlaps, distributed=distributed)
    chunks = training.chunks
    schedule = megatron_epp.wrap_samples(loss=ClippedRatio(average=Average.SEQUENCE_MEANS), **SETTINGS)

    def gradients(*batches: Any) -> list[Tensor]:
        training.zero()
        for number, batch in enumerate(batches, start=1):
            schedule(model=chunks, samples=batch, last=number == len(batches))
        if not distributed:
            return training.gradients()
        whole = [(buffer.grad_data, buffer.data_parallel_group) for chunk in chunks for buffer in chunk.buffers]
        return [x.chunk(replicas)[dist.get_rank(group)].clone() for x, group in whole]  # the part that this replica steps

    def refused(name: str, batch: Any) -> None:
        said[name] = refusal(lambda: schedule(model=chunks, samples=batch))

    training.config.attention_dropout = 0.1 * (dist.get_rank() == 0)
    refused("a model", samples)
    training.config.attention_dropout = 0.0
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
    training.zero()
    if replicas > 1:
        refused("too few", samples[:1])
    schedule(model=chunks, samples=samples[:3], last=False)  # given up
    found["given up"] = gradients(samples)
    old = samples[2]["old_logprobs"].clone()
    old[17] = -1e4
    stale = [one | ({"advantages": -1.0, "old_logprobs": old, "trained": 1} if one is samples[2] else {}) for one in samples]
    training.zero()
    refused("overflow", stale)
    left = sum(float(p.main_grad.abs().sum()) for chunk in chunks for p in chunk.parameters())
    found["after an overflow"] = gradients(samples)
    away = {name: apart(one, whole) for name, one in found.items()}
    away["one whose gradients are 0 before"] = apart(gradients(no_advantage, samples[2:]), whole_without)
    schedule.close()
    return {"apart": away, "said": said, "left": left}


class Head(torch.nn.Linear):
    """Value head as programs have it: in the output layer's place, on every tensor-parallel rank, with a bias."""

    def __init__(self, config: Any, gathers: bool = True) -> None:
        torch.manual_seed(5)
        super().__init__(config.hidden_size, 1)
        self.gathers = config.sequence_parallel and gathers
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = super().forward(input_).float()
        return gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False) if self.gathers else values, None


def put_heads(models: list[Any], **settings: Any) -> None:
    for bare in models:
        if bare.post_process:
            bare.output_layer = Head(bare.config, **settings)


def made_for_values() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(6)
    samples = made()
    for sample in samples:
        tokens = len(sample["tokens"])
        sample["old_values"] = 0.3 * torch.randn(tokens, generator=random)
        sample["returns"] = torch.randn(tokens, generator=random)
    return [{key: x[:-1] if key != "advantages" else x for key, x in sample.items()} for sample in samples]


def whole_value_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    """Run a sample whole. Its loss is the clipped error of values, written down in torch."""
    sample = next(data)
    values = outputs(model, sample["tokens"][None], None)

    def loss_of(output: Tensor) -> tuple[Any, ...]:
        of_tokens, mask, old = output.reshape(-1), sample["trained"].float(), sample["old_values"]
        near = torch.minimum(torch.maximum(of_tokens, old - 0.2), old + 0.2)
        each = torch.maximum((of_tokens - sample["returns"]) ** 2, (near - sample["returns"]) ** 2) / 2
        mean = (each * mask).sum() / mask.sum()
        return mean, torch.tensor(1), {"loss": mean.detach(), "values": of_tokens.detach().clone()}

    return values, loss_of


def values(replicas: int = 1, tensor_parallel: int = 1, stages: int | None = None, **settings: Any) -> dict[str, Any]:
    """Return how far a training of a value model in slices is from one by Megatron's schedule."""
    loop = begin(LENGTHS, stages, replicas=replicas, tensor_parallel=tensor_parallel, calculate_per_token_loss=True, **settings)
    from megatron.core import parallel_state

    put_heads(loop.models)
    training = DataParallel(loop, made_for_values(), whole_value_step)
    expected, results = training.whole()
    schedule = megatron_epp.wrap_samples(loss=ClippedValue(average=Average.SEQUENCE_MEANS), **SETTINGS)
    gradients, report = training.sliced(schedule, wants_values=True)
    _, evaluated = training.sliced(schedule, forward_only=True, wants_values=True)
    afterwards, _ = training.whole()
    found = report.values[parallel_state.get_data_parallel_rank() :: replicas]
    return {
        "worst": apart(gradients, expected),
        "afterwards": apart(afterwards, expected),
        "loss": report.means["value loss"],
        "expected": [float(one["loss"]) for one in results],
        "lengths": [len(one) for one in report.values],
        "values": [float((torch.from_numpy(a) - b["values"]).abs().max()) for a, b in zip(found, results, strict=False)],
        "evaluated": max(float(abs(a - b).max()) for a, b in zip(report.values, evaluated.values, strict=True)),
        "logprobs": len(report.logprobs),
        "divisor": report.divisor,
        "chunks": report.num_chunks,
    }


def whole_teacher_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    """Run a sample whole. Its loss is the divergence over a teacher's tokens, written down in torch for whole distributions."""
    sample = next(data)
    logits = outputs(model, sample["tokens"][None, :-1], None)

    def loss_of(output: Tensor) -> tuple[Any, ...]:
        probabilities, mask = (output[0] / 0.8).softmax(1), sample["trained"][1:].float()
        p = probabilities.gather(1, sample["teacher_tokens"][1:])
        p, q = (x / x.sum(1, keepdim=True) for x in (p, sample["teacher_logprobs"][1:].exp()))
        mean = ((q * (q.log() - p.log())).sum(1) * mask).sum() / mask.sum()
        return mean, torch.tensor(1), {"loss": mean.detach()}

    return logits, loss_of


def distillation() -> dict[str, Any]:
    """Return how far a distillation in slices and by blocks is from one with whole logits by Megatron's schedule."""
    loop = begin(LENGTHS, calculate_per_token_loss=True)
    random, samples = torch.Generator().manual_seed(7), made()
    for sample in samples:
        shape = len(sample["tokens"]), 3
        sample["teacher_tokens"] = torch.randint(64, shape, generator=random)
        sample["teacher_logprobs"] = -1 - torch.rand(shape, generator=random)
    training = DataParallel(loop, samples, whole_teacher_step)
    expected, results = training.whole()
    loss = Distillation(3, average=Average.SEQUENCE_MEANS, temperature=0.8)
    found, report = training.sliced(megatron_epp.wrap_samples(loss=loss, **SETTINGS, loss_block_tokens=7))
    figures = {"loss": report.means["distillation"], "expected": [float(one["loss"]) for one in results]}
    return figures | {"worst": apart(found, expected), "chunks": report.num_chunks}


def divided_head() -> dict[str, Any]:
    """Return how far the head of `--epp-loss` on two ranks that share tokens is from one on all tokens.

    And what is said of a head of a program's own that leaves tokens divided.
    """
    loop = begin(LENGTHS, tensor_parallel=2, calculate_per_token_loss=True, sequence_parallel=True)
    from megatron.core import parallel_state

    from megatron_epp.features.losses.value_head import ValueHead

    group = parallel_state.get_tensor_model_parallel_group()
    head = ValueHead(loop.models[0].config, group)
    random = torch.Generator().manual_seed(8)
    hidden, of_values = (torch.randn(8, 1, width, generator=random) for width in (head.in_features, 1))
    own = hidden.chunk(2)[dist.get_rank()].clone().requires_grad_()
    values = head(own)[0]
    values.backward(of_values)
    dist.all_reduce(head.weight.grad, group=group)  # as Megatron does for weights with this attribute
    wanted = of_values * head.weight.detach()
    put_heads(loop.models, gathers=False)
    schedule = megatron_epp.wrap_samples(loss=ClippedValue(), **SETTINGS)
    return {
        "said": refusal(lambda: schedule(model=loop.models, samples=made_for_values())),
        "attribute": head.weight.sequence_parallel,
        "values": apart([values.detach()], [hidden @ head.weight.detach().t()]),
        "hidden": apart([own.grad], [wanted.chunk(2)[dist.get_rank()]]),
        "weight": apart([head.weight.grad], [(of_values * hidden).sum((0, 1))[None]]),
        "norm": float(head.weight.detach().norm()),
    }


def value_refusals() -> dict[str, str]:
    """Return what is said of losses and models that do not go together, and of samples with other columns."""
    loop = begin(LENGTHS, calculate_per_token_loss=True)

    def refused(loss: Any, samples: Any, plans: Any = None, **named: Any) -> str:
        wrap = partial(megatron_epp.wrap_samples, loss=loss, **SETTINGS | dict(plans or {}))
        return refusal(lambda: wrap()(model=loop.models, samples=samples, **named))

    samples, for_values = made(), made_for_values()
    teacher = {"teacher_tokens": torch.zeros(41, 3), "teacher_logprobs": torch.full((41, 3), -2.0)}
    above = teacher["teacher_tokens"] + 64
    narrow = {name: column[:, :2] for name, column in teacher.items()}
    said = {
        "a vocabulary": refused(ClippedValue(), for_values),
        "log-probabilities of values": refused(ClippedValue(), for_values, wants_logprobs=True),
        "values of log-probabilities": refused(ClippedRatio(), samples, wants_values=True),
        "another width": refused(Distillation(3), [samples[0] | narrow]),
        "no width": refused(Distillation(3), [samples[0] | teacher | {"teacher_logprobs": -1.0}]),
        "above the vocabulary": refused(Distillation(3), [samples[0] | teacher | {"teacher_tokens": above}]),
        "no token": refused(Distillation(3), [samples[0] | teacher | {"teacher_tokens": above - 0.5}]),
        "token above the vocabulary": refused(ClippedRatio(), [samples[0] | {"tokens": torch.arange(41) + 60}]),
        "no loss": refused(object(), samples),
    }
    put_heads(loop.models)
    said["one output"] = refused(ClippedRatio(), samples)
    said["blocks"] = refused(ClippedValue(), for_values, {"loss_block_tokens": 5})
    return said
