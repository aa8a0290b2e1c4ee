"""Cross entropy of an output layer divided over ranks: losses and gradients are those of torch's on the whole vocabulary."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_epp.features.vocabulary import pipeline_shards
from megatron_epp.features.vocabulary.pipeline_shards import PipelineShards, Targets
from megatron_epp.features.vocabulary.shards import Shard, ShardSummary, logits_pass, scale_part, weight_gradient
from megatron_epp.plan import Action, Op
from megatron_epp.runtime.autograd.handles import give_gradient
from megatron_epp.runtime.recorder import Recorder

TOKENS, WIDTH = 13, 6
DIVISIONS = {"even": (0, 8, 16, 24), "uneven": (0, 1, 17, 24), "one rank": (0, 24)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def problem(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, labels on every edge of a division, and weights of tokens, one of them 0."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = scale * torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 7, 8, 15, 16, 17, 23, 3, 3, 20, 9, 0])
    weights = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    weights[4] = 0.0
    return x.to(dtype), weight.to(dtype), labels, weights.to(dtype)


def exact(x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and gradients of the input for tokens of weight one and of the weight for the given weights, in fp64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    losses = cross_entropy(x @ weight.t(), labels, reduction="none")
    (of_input,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    (of_weight,) = torch.autograd.grad((losses * weights.double()).sum(), weight)
    return losses.detach(), of_input, of_weight


def sharded(
    x: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, bounds: tuple[int, ...], block_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by shards, whose sums over ranks are taken here."""
    shards = [Shard(weight[start:end], start, block_tokens) for start, end in pairwise(bounds)]
    passed = [logits_pass(x, labels, shard, needs_gradient=True) for shard in shards]
    most = torch.stack([one.summary.most for one in passed]).amax(0)
    losses, log_sum = ShardSummary.combined(most, sum(one.summary.addends(most) for one in passed))  # type: ignore[arg-type]
    parts = [scale_part(one, log_sum, labels, shard) for one, shard in zip(passed, shards, strict=True)]
    rows = [weight_gradient(x, labels, one, log_sum, weights, shard) for one, shard in zip(passed, shards, strict=True)]
    return losses, torch.stack(parts).sum(0), torch.cat(rows)


@pytest.mark.parametrize("label", [None, 2], ids=["every shard has labels", "one shard has all"])
@pytest.mark.parametrize("block_tokens", [0, 4])
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_losses_and_gradients_are_those_of_the_whole_vocabulary(
    dtype: torch.dtype, division: str, block_tokens: int, label: int | None
) -> None:
    x, weight, labels, weights = problem(dtype)
    given = x, weight, labels if label is None else torch.full_like(labels, label), weights
    for found, wanted in zip(sharded(*given, DIVISIONS[division], block_tokens), exact(*given), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("block_tokens", [0, 4])
def test_logits_of_thousands_overflow_nothing(block_tokens: int) -> None:
    given = problem(torch.float32, scale=1000.0)
    found = sharded(*given, DIVISIONS["uneven"], block_tokens)
    for one, wanted in zip(found, exact(*given), strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_a_gradient_of_a_label_that_is_almost_certain_keeps_its_digits_in_bf16() -> None:
    """As the difference of two products it would be mostly rounding. The logits are exact: 12 for the label, else 0."""
    x, weight, labels, weights = problem(torch.bfloat16)
    x, labels = torch.zeros_like(x), torch.full_like(labels, 9)
    x[:, 0], weight[:, 0], weight[9, 0] = 12.0, 0.0, 1.0
    _, found, _ = sharded(x, weight, labels, weights, DIVISIONS["even"], 0)
    _, wanted, _ = exact(x, weight, labels, weights)
    assert wanted.norm(dim=1).max() < 2**-9
    assert (found - wanted).norm() <= 2**-8 * wanted.norm()


def test_parts_of_the_inputs_gradient_are_fp32_for_bf16_weights_and_evaluation_keeps_statistics_alone() -> None:
    x, weight, labels, _ = problem(torch.bfloat16)
    passed = logits_pass(x, labels, Shard(weight, 0), needs_gradient=True)
    assert (passed.part.dtype, passed.exponentials.dtype) == (torch.float32, torch.bfloat16)
    assert passed.summary.summed.dtype == torch.float32
    passed = logits_pass(x, labels, Shard(weight, 0), needs_gradient=False)
    assert (passed.part, passed.exponentials) == (None, None)


def test_by_blocks_no_logits_are_kept_and_parts_go_to_the_main_gradient() -> None:
    x, weight, labels, weights = problem(torch.float64)
    main, sizes = torch.zeros_like(weight), []

    def accumulate(rows: Tensor, grad: Tensor) -> Tensor:
        sizes.append(len(rows))
        main.add_(grad.t() @ rows)
        return torch.empty_like(weight)

    shard = Shard(weight, 0, 4, accumulate)
    passed = logits_pass(x, labels, shard, needs_gradient=True)
    assert passed.exponentials is None
    _, log_sum = ShardSummary.combined(passed.summary.most, passed.summary.addends(passed.summary.most))
    weight_gradient(x, labels, passed, log_sum, weights, shard)
    assert max(sizes) <= 4
    torch.testing.assert_close(main, exact(x, weight, labels, weights)[2])


def test_a_gradient_passes_the_hooks_of_its_weight() -> None:
    weight, seen = torch.zeros(3, 2, requires_grad=True), []
    weight.register_post_accumulate_grad_hook(lambda given: seen.append(given.grad.clone()))
    with torch.no_grad():
        give_gradient(weight, lambda: torch.ones(3, 2))
        give_gradient(weight, lambda: torch.ones(3, 2))
    assert [float(grad.sum()) for grad in seen] == [6.0, 12.0]


class Broadcast:
    """Work of a broadcast, which notes what is asked of it and calls back at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def wait(self) -> None:
        self.asked.append("wait")

    def get_future(self) -> Any:
        self.asked.append("callback")
        return SimpleNamespace(add_done_callback=lambda call: call(None))


@pytest.mark.parametrize(("device", "asked", "known_before"), [("cpu", ["callback", "wait"], 1), ("meta", ["wait"], 0)])
def test_on_a_device_the_time_of_a_broadcast_takes_no_stream_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: list[str], known_before: int
) -> None:
    """A callback has one, behind which all later launches stand in a single hardware queue."""
    work = Broadcast()
    monkeypatch.setattr(pipeline_shards.dist, "broadcast", lambda *_, **__: work)
    monkeypatch.setattr(pipeline_shards, "logits_pass", lambda *_: None)
    tokens = torch.zeros(TOKENS)
    rank: Any = SimpleNamespace(
        targets=lambda chunk: Targets((TOKENS, WIDTH), tokens, tokens, lambda x: x),
        message=lambda: (torch.float32, torch.device(device)),
        shard=lambda: None,
    )
    executor: Any = SimpleNamespace(recorder=Recorder(), plan=SimpleNamespace(forward_only=False))
    executor.recorder.begin()
    handlers = PipelineShards(rank, SimpleNamespace(root=0, spread=None), None, Any).handlers()  # type: ignore[arg-type]
    handlers[Op.SPREAD](executor, Action(Op.SPREAD, 0, 0))
    assert len(executor.recorder.collectives()) == known_before
    handlers[Op.S](executor, Action(Op.S, 0, 0))
    assert work.asked == asked
    assert [action for action, _ in executor.recorder.collectives()] == [Action(Op.SPREAD, 0, 0)]
