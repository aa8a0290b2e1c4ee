"""Losses by blocks of only the tokens that count: as those of all tokens under their mask, with fewer products."""

import pytest
import torch

from megatron_epp.cost.output_layer import loss_workspace_bytes
from megatron_epp.runtime.loss import token_blocks
from megatron_epp.runtime.loss.token_blocks import Head, block_losses
from tests.support.runtime.allocations import peak_bytes_of
from tests.support.runtime.block_loss_runs import exact_kernel, losses_and_gradients, problem, shared_vocabulary
from tests.support.runtime.rank_processes import Ranks

TOKENS, BLOCK = 11, 3
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


def test_a_main_gradient_gets_parts_of_the_tokens_that_count_only():
    x, weight, labels = problem(TOKENS)
    mask, rows = masked("some")
    (expected,) = losses_and_gradients(block_losses(x, x, weight, labels, Head(BLOCK)), mask, (weight,))[1:]
    main, num_tokens = torch.zeros_like(weight), []

    def accumulate(part, grad):
        num_tokens.append(len(part))
        main.add_(grad.t() @ part)
        return torch.empty_like(weight)

    losses = block_losses(x, x, weight, labels, Head(BLOCK, accumulate=accumulate, rows=rows))
    losses_and_gradients(losses, mask, (weight,))
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("loss_rows")) as started:
        yield started


def test_ranks_that_share_the_vocabulary_get_the_same(ranks):
    x, weight, labels = problem(TOKENS)
    mask, rows = masked("some")
    expected = losses_and_gradients(block_losses(x, x, weight, labels, Head(BLOCK)), mask, (x, weight))
    found = ranks.run(shared_vocabulary, x.detach(), weight.detach(), labels, mask, BLOCK, rows)
    for own, _, _ in found:
        torch.testing.assert_close(own, expected[0] * mask)
    torch.testing.assert_close(sum(part for _, part, _ in found), expected[1])
    torch.testing.assert_close(torch.cat([part for _, _, part in found]), expected[2])
