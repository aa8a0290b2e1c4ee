"""Losses by blocks: as plain cross entropy, in less memory."""

import pytest
import torch
from torch.nn import functional

from megatron_epp.cost.output_layer import loss_workspace_bytes
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.loss import token_blocks
from megatron_epp.runtime.loss.token_blocks import Head, block_losses, block_values
from tests.support.runtime.allocations import peak_bytes_of
from tests.support.runtime.block_loss_runs import (
    ENTRIES,
    WIDTH,
    bf16_errors,
    exact_kernel,
    losses_and_gradients,
    plain,
    problem,
    shared_values,
)
from tests.support.runtime.rank_processes import Ranks

TOKENS = 11
MASK = (torch.arange(TOKENS) % 3 != 1).double()
SOME = pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 3, 7]), torch.tensor([10])], ids=["all", "some", "the last"])


def by_blocks(x, weight, labels, block_tokens=4):
    return block_losses(x, x, weight, labels, Head(block_tokens))


def counted_in(rows):
    """The loss's gradient of every token: masked, or 1 for the tokens that count."""
    return MASK if rows is None else torch.zeros_like(MASK).index_fill_(0, rows, 1.0)


def several(labels):
    """Three entries of every token after its label: the label again, another twice."""
    others = (7 * torch.arange(TOKENS) + 3) % ENTRIES
    return torch.stack([labels, labels, others, others], dim=1)


def plain_values(x, weight, entries, has_entropy):
    logprobs = functional.log_softmax(x @ weight.t(), dim=1)
    entropy = -(logprobs.exp() * logprobs).sum(1)[None]
    return torch.cat([-logprobs.gather(1, entries).t(), *[entropy] * has_entropy])


FACTORS = torch.tensor([[1.0], [0.7], [-0.4], [1.3], [-0.3]], dtype=torch.float64)
ENTRIES_OF = {"the label": lambda labels: labels[:, None], "several": several}


@pytest.mark.parametrize("has_entropy", [False, True], ids=["entries", "entries and entropy"])
@SOME
@pytest.mark.parametrize("block_tokens", [1, 3, TOKENS, 100])
@pytest.mark.parametrize("entries_of", ENTRIES_OF)
def test_values_of_a_token_and_their_gradients_are_those_of_the_whole_distribution(entries_of, block_tokens, rows, has_entropy):
    x, weight, labels = problem(TOKENS, dtype=torch.float64)
    entries, counted = ENTRIES_OF[entries_of](labels), counted_in(rows)
    expected = plain_values(x, weight, entries, has_entropy) * counted
    actual = block_values(x, x, weight, entries, Head(block_tokens, rows=rows, has_entropy=has_entropy)) * counted
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    wanted = torch.autograd.grad((FACTORS[: len(expected)] * expected).sum(), (x, weight))
    grads = torch.autograd.grad((FACTORS[: len(expected)] * actual).sum(), (x, weight))
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, one, rtol=1e-11, atol=1e-13)


def test_logits_that_would_overflow_do_not():
    x, weight, labels = problem(TOKENS)
    x = (x.detach() * 1e4).requires_grad_()
    expected, actual = (losses_and_gradients(of(x, weight, labels), MASK.float(), (x, weight)) for of in (plain, by_blocks))
    for wanted, tensor in zip(expected, actual, strict=True):
        torch.testing.assert_close(tensor, wanted)


def test_in_bf16_many_blocks_round_hardly_more_than_one():
    """Parts of the weight's gradient are rounded, their sum is not: a sum in bf16 would be four times as far off."""
    mask = (torch.arange(512) % 3 != 1).float()
    ordinary = bf16_errors(plain, mask, ENTRIES)
    blocks = bf16_errors(lambda *inputs: by_blocks(*inputs, block_tokens=8), mask, ENTRIES)
    assert all(mine < 1.3 * theirs for mine, theirs in zip(blocks, ordinary, strict=True)), (blocks, ordinary)


def test_a_weight_or_an_input_without_gradient_gets_none():
    x, weight, labels = problem(TOKENS, dtype=torch.float64)
    (grad,) = losses_and_gradients(by_blocks(x, weight.detach(), labels), MASK, (x,))[1:]
    (expected,) = losses_and_gradients(plain(x, weight, labels), MASK, (x,))[1:]
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        assert torch.equal(by_blocks(x, weight, labels), by_blocks(*(t.detach() for t in (x, weight)), labels))


def test_kept_are_the_input_and_two_numbers_of_every_token():
    x, weight, labels = problem(TOKENS)
    with SavedTensors([weight]) as meter:
        losses = by_blocks(x, weight, labels)
        assert meter.live_bytes == TOKENS * (4 * WIDTH + 8 + 4)  # a label, as it came, is eight bytes
        losses.backward(MASK.float())
        assert meter.live_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_is_what_there_is_beside_inputs_and_their_gradients(dtype):
    tokens, entries, width, block = 256, 2048, 16, 32
    x, weight, labels = problem(tokens, entries, width, dtype)
    mask = (torch.arange(tokens) % 3 != 1).float()
    workspace = loss_workspace_bytes(block, entries, width, dtype.itemsize)
    beside = 64 * tokens + tokens * width * dtype.itemsize  # a few numbers of every token, and the input's gradient
    for run in (lambda: by_blocks(x, weight, labels, block), lambda: by_blocks(x, weight, labels, block).backward(mask)):
        peak = peak_bytes_of(run)
        assert 0.5 * workspace < peak < 1.02 * workspace + beside
        x.grad = weight.grad = None
    whole = peak_bytes_of(lambda: plain(x, weight, labels).backward(mask))
    assert whole > 3 * (workspace + beside)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("block_loss")) as started:
        yield started


@pytest.mark.parametrize("has_entropy", [False, True], ids=["entries", "entries and entropy"])
@SOME
@pytest.mark.parametrize("entries_of", ENTRIES_OF)
def test_ranks_that_share_the_vocabulary_get_the_same(ranks, entries_of, rows, has_entropy):
    x, weight, labels = problem(TOKENS, dtype=torch.float64)
    entries, counted = ENTRIES_OF[entries_of](labels), counted_in(rows)
    expected = plain_values(x, weight, entries, has_entropy)
    grad = FACTORS[: len(expected)] * counted
    values, grad_x, grad_weight = losses_and_gradients(expected, grad, (x, weight))
    results = ranks.run(shared_values, x.detach(), weight.detach(), entries, grad, rows, has_entropy)
    for own, _, _ in results:
        torch.testing.assert_close(own, values if rows is None else values * counted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(part for _, part, _ in results), grad_x, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat([part for _, _, part in results]), grad_weight, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kernel", [None, exact_kernel()], ids=["torch", "kernel"])
def test_blocks_may_add_to_a_main_gradient_themselves_and_read_only_tokens_that_count(kernel, monkeypatch):
    monkeypatch.setattr(token_blocks, "explain", lambda case: (kernel, ""))
    x, weight, labels = problem(TOKENS)
    rows, grad = torch.tensor([0, 3, 4, 6, 9, 10]), torch.linspace(-1.7, 2.9, TOKENS)
    counted = torch.zeros_like(grad).index_fill_(0, rows, 1.0)
    (expected,) = losses_and_gradients(plain(x, weight, labels), grad * counted, (weight,))[1:]
    unread = torch.where(counted[:, None] > 0, x.detach(), torch.nan)
    main, num_tokens, stand_in = torch.zeros_like(weight), [], torch.full_like(weight, 7.0)

    def accumulate(part, of_logits):
        num_tokens.append(len(part))
        main.add_(of_logits.t() @ part)
        return stand_in

    losses = block_losses(unread, unread, weight, labels, Head(3, accumulate=accumulate, rows=rows))
    assert torch.equal(losses_and_gradients(losses, grad, (weight,))[1], stand_in)
    torch.testing.assert_close(main, expected)
    assert (sum(num_tokens), max(num_tokens)) == (len(rows), 3)


def test_no_more_memory_is_taken_than_for_all_tokens():
    x, weight, labels = problem(256, entries=2048, width=16)
    some = torch.arange(0, 256, 2)
    mask = torch.zeros(256).index_fill_(0, some, 1.0)
    peaks = [
        peak_bytes_of(lambda rows=rows: block_losses(x, x, weight, labels, Head(32, rows=rows)).backward(mask))
        for rows in (some, None)
    ]
    assert peaks[0] < peaks[1] + 0.03 * loss_workspace_bytes(32, 2048, 16, 4)
