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
    exact_kernel,
    losses_and_gradients,
    problem,
    shared_values,
    shared_vocabulary,
)
from tests.support.runtime.rank_processes import Ranks

TOKENS = 11


def tensors(tokens=TOKENS, entries=ENTRIES, width=WIDTH, dtype=torch.float64):
    """Hidden states, a weight, labels, and the loss's gradient of every token, of which some are masked."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (tokens, entries))
    labels = torch.randint(entries, (tokens,), generator=generator)
    mask = (torch.arange(tokens) % 3 != 1).to(dtype)
    return x.to(dtype).requires_grad_(), (weight * width**-0.5).to(dtype).requires_grad_(), labels, mask


def by_blocks(x, weight, labels, block_tokens):
    return block_losses(x, x, weight, labels, Head(block_tokens))


def plain(x, weight, labels):
    return functional.cross_entropy(
        (x @ weight.t()).to(max(x.dtype, torch.float32, key=lambda t: t.itemsize)), labels, reduction="none"
    )


@pytest.mark.parametrize("block_tokens", [1, 2, 4, TOKENS - 1, TOKENS, 100])
def test_losses_and_gradients_are_those_of_plain_cross_entropy(block_tokens):
    x, weight, labels, mask = tensors()
    expected = losses_and_gradients(plain(x, weight, labels), mask, (x, weight))
    found = losses_and_gradients(by_blocks(x, weight, labels, block_tokens), mask, (x, weight))
    for wanted, tensor in zip(expected, found, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-12, atol=1e-14)


def several(labels):
    """Three entries of every token after its label: the label again, another twice."""
    others = (7 * torch.arange(TOKENS) + 3) % ENTRIES
    return torch.stack([labels, labels, others, others], dim=1)


def plain_values(x, weight, entries):
    logprobs = functional.log_softmax(x @ weight.t(), dim=1)
    return torch.cat([-logprobs.gather(1, entries).t(), -(logprobs.exp() * logprobs).sum(1)[None]])


FACTORS = torch.tensor([[1.0], [0.7], [-0.4], [1.3], [-0.3]], dtype=torch.float64)


ENTRIES_OF = {"the label": lambda labels: labels[:, None], "several": several}


@pytest.mark.parametrize("has_entropy", [False, True], ids=["entries", "entries and entropy"])
@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 3, 7])], ids=["all", "some"])
@pytest.mark.parametrize("block_tokens", [1, 3, TOKENS])
@pytest.mark.parametrize("entries_of", ENTRIES_OF)
def test_values_of_a_token_and_their_gradients_are_those_of_the_whole_distribution(entries_of, block_tokens, rows, has_entropy):
    x, weight, labels, mask = tensors()
    counted = mask if rows is None else torch.zeros(TOKENS, dtype=mask.dtype).index_fill_(0, rows, 1.0)
    entries = ENTRIES_OF[entries_of](labels)
    expected = plain_values(x, weight, entries)
    factors = FACTORS[-len(expected) :]
    if not has_entropy:
        expected, factors = expected[:-1], factors[:-1]
    expected = expected * counted
    found = block_values(x, x, weight, entries, Head(block_tokens, rows=rows, has_entropy=has_entropy)) * counted
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    wanted = torch.autograd.grad((factors * expected).sum(), (x, weight))
    for one, tensor in zip(wanted, torch.autograd.grad((factors * found).sum(), (x, weight)), strict=True):
        torch.testing.assert_close(tensor, one, rtol=1e-11, atol=1e-13)


def test_logits_that_would_overflow_do_not():
    x, weight, labels, mask = tensors(dtype=torch.float32)
    x = (x.detach() * 1e4).requires_grad_()
    expected = losses_and_gradients(plain(x, weight, labels), mask, (x, weight))
    found = losses_and_gradients(by_blocks(x, weight, labels, 4), mask, (x, weight))
    for wanted, tensor in zip(expected, found, strict=True):
        torch.testing.assert_close(tensor, wanted)


def test_in_bf16_many_blocks_round_hardly_more_than_one():
    """Parts of the weight's gradient are rounded, their sum is not: a sum in bf16 would be four times as far off."""
    exact_x, exact_weight, labels, mask = tensors(tokens=512)
    exact_x, exact_weight = (t.bfloat16().double().detach().requires_grad_() for t in (exact_x, exact_weight))
    exact = losses_and_gradients(plain(exact_x, exact_weight, labels), mask, (exact_x, exact_weight))
    x, weight = (t.detach().bfloat16().requires_grad_() for t in (exact_x, exact_weight))

    def errors(losses):
        found = losses_and_gradients(losses, mask.float(), (x, weight))
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    ordinary, blocks = errors(plain(x, weight, labels)), errors(by_blocks(x, weight, labels, 8))
    assert all(mine < 1.3 * theirs for mine, theirs in zip(blocks, ordinary, strict=True)), (blocks, ordinary)


def test_a_weight_or_an_input_without_gradient_gets_none():
    x, weight, labels, mask = tensors()
    (grad,) = losses_and_gradients(by_blocks(x, weight.detach(), labels, 4), mask, (x,))[1:]
    (expected,) = losses_and_gradients(plain(x, weight, labels), mask, (x,))[1:]
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        assert torch.equal(by_blocks(x, weight, labels, 4), by_blocks(*(t.detach() for t in (x, weight)), labels, 4))


def test_kept_are_the_input_and_two_numbers_of_every_token():
    x, weight, labels, mask = tensors(dtype=torch.float32)
    with SavedTensors([weight]) as meter:
        losses = by_blocks(x, weight, labels, 4)
        assert meter.live_bytes == TOKENS * (4 * WIDTH + 8 + 4)  # a label, as it came, is eight bytes
        losses.backward(mask)
        assert meter.live_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_is_what_there_is_beside_inputs_and_their_gradients(dtype):
    tokens, entries, width, block = 256, 2048, 16, 32
    x, weight, labels, mask = tensors(tokens, entries, width, dtype)
    workspace = loss_workspace_bytes(block, entries, width, dtype.itemsize)
    beside = 64 * tokens + tokens * width * dtype.itemsize  # a few numbers of every token, and the input's gradient
    for run in (
        lambda: by_blocks(x, weight, labels, block),
        lambda: by_blocks(x, weight, labels, block).backward(mask.float()),
    ):
        peak = peak_bytes_of(run)
        assert 0.5 * workspace < peak < 1.02 * workspace + beside
        x.grad = weight.grad = None
    whole = peak_bytes_of(lambda: plain(x, weight, labels).backward(mask.float()))
    assert whole > 3 * (workspace + beside)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("block_loss")) as started:
        yield started


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 3, 7])], ids=["all", "some"])
def test_ranks_that_share_the_vocabulary_get_the_same(ranks, rows):
    x, weight, labels, mask = tensors()
    counted = mask if rows is None else torch.zeros(TOKENS, dtype=mask.dtype).index_fill_(0, rows, 1.0)
    losses, grad_x, grad_weight = losses_and_gradients(plain(x, weight, labels), counted, (x, weight))
    expected = losses if rows is None else losses * counted
    found = ranks.run(shared_vocabulary, x.detach(), weight.detach(), labels, counted, 4, rows)
    for own, _, _ in found:
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(part for _, part, _ in found), grad_x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([part for _, _, part in found]), grad_weight, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("has_entropy", [False, True], ids=["entries", "entries and entropy"])
def test_ranks_that_share_the_vocabulary_get_the_same_of_several_entries(ranks, has_entropy):
    x, weight, labels, mask = tensors()
    entries, grad = several(labels), FACTORS[: 4 + has_entropy] * mask
    expected = plain_values(x, weight, entries)[: 4 + has_entropy]
    values, grad_x, grad_weight = losses_and_gradients(expected, grad, (x, weight))
    found = ranks.run(shared_values, x.detach(), weight.detach(), entries, grad, has_entropy)
    for own, _, _ in found:
        torch.testing.assert_close(own, values, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(part for _, part, _ in found), grad_x, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat([part for _, _, part in found]), grad_weight, rtol=1e-11, atol=1e-13)


BLOCK = 3
MASKS = {"some": [1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1], "one": [0] * 4 + [1] + [0] * 6, "the last": [0] * 10 + [1]}


def masked(name):
    mask = torch.tensor(MASKS[name], dtype=torch.float32)
    return mask, mask.nonzero().squeeze(1)


@pytest.mark.parametrize("kernel", [None, exact_kernel()])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_all_tokens_under_the_mask(name, kernel, monkeypatch):
    monkeypatch.setattr(token_blocks, "explain", lambda case: (kernel, ""))
    x, weight, labels = problem(TOKENS)
    mask, rows = masked(name)
    expected = losses_and_gradients(block_losses(x, x, weight, labels, Head(BLOCK)), mask, (x, weight))
    losses, *grads = losses_and_gradients(block_losses(x, x, weight, labels, Head(BLOCK, rows=rows)), mask, (x, weight))
    torch.testing.assert_close(losses, expected[0] * mask)
    for found, wanted in zip(grads, expected[1:], strict=True):
        torch.testing.assert_close(found, wanted)
    assert not grads[0][mask == 0].any()


def test_only_tokens_that_count_are_multiplied_with_the_weight(monkeypatch):
    x, weight, labels = problem(TOKENS)
    mask, rows = masked("some")
    multiplied = []
    summary = token_blocks._summary
    monkeypatch.setattr(token_blocks, "_summary", lambda part, *rest: multiplied.append(part) or summary(part, *rest))
    block_losses(x, x, weight, labels, Head(BLOCK, rows=rows))
    assert torch.equal(torch.cat(multiplied), x[mask == 1])
    assert max(map(len, multiplied)) <= BLOCK


def test_blocks_may_add_to_a_main_gradient_themselves_of_the_tokens_that_count_only():
    x, weight, labels = problem(TOKENS)
    mask, rows = masked("some")
    (expected,) = losses_and_gradients(block_losses(x, x, weight, labels, Head(BLOCK)), mask, (weight,))[1:]
    main, num_tokens, stand_in = torch.zeros_like(weight), [], torch.full_like(weight, 7.0)

    def accumulate(part, grad):
        num_tokens.append(len(part))
        main.add_(grad.t() @ part)
        return stand_in

    losses = block_losses(x, x, weight, labels, Head(BLOCK, accumulate=accumulate, rows=rows))
    assert torch.equal(losses_and_gradients(losses, mask, (weight,))[1], stand_in)
    torch.testing.assert_close(main, expected)
    assert sum(num_tokens) == mask.sum()


def test_no_more_memory_is_taken_than_for_all_tokens():
    x, weight, labels = problem(256, entries=2048, width=16)
    rows = torch.arange(0, 256, 2)
    mask = torch.zeros(256)
    mask[rows] = 1
    peaks = [
        peak_bytes_of(lambda rows=rows: block_losses(x, x, weight, labels, Head(32, rows=rows)).backward(mask))
        for rows in (rows, None)
    ]
    assert peaks[0] < peaks[1] + 0.03 * loss_workspace_bytes(32, 2048, 16, 4)
