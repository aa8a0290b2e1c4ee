"""Jobs of `test_samples.py` on values of a head, and on log-probabilities of a teacher's tokens."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from megatron_epp.losses import Average, ClippedRatio, ClippedValue, Distillation
from tests.support.mcore.jobs.data_parallel import DataParallel
from tests.support.mcore.jobs.frameworks import apart, begin, outputs, refusal
from tests.support.mcore.jobs.samples import LENGTHS, SETTINGS, made


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
