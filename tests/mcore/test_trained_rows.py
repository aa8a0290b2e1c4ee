"""Which tokens of a chunk go through the output layer. That training stays the same is in `test_matrix.py`."""

import contextlib
import types

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_epp.mcore.model import trained_rows as module
from megatron_epp.mcore.model.trained_rows import TrainedRows, rows_to_compute, trained_rows

TOKENS, WIDTH, ENTRIES = 7, 4, 10


class Output(torch.nn.Module):
    """An output layer that records what it multiplies."""

    def __init__(self, sequence_parallel=False):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(ENTRIES, WIDTH))
        self.sequence_parallel, self.tp_group, self.seen = sequence_parallel, "ranks", []

    def forward(self, input_, weight=None, runtime_gather_output=None):
        self.seen.append((len(input_), self.sequence_parallel))
        return input_ @ self.weight.t(), None


class Model(torch.nn.Module):
    """A model as far as its loss goes."""

    def __init__(self, **options):
        super().__init__()
        self.output_layer = Output(**options)

    def compute_language_model_loss(self, labels, logits):
        return torch.nn.functional.cross_entropy(logits.transpose(0, 1)[0], labels[0], reduction="none")[None]

    def forward(self, hidden, labels):
        logits, _ = self.output_layer(hidden, weight=None, runtime_gather_output=None)
        return self.compute_language_model_loss(labels, logits)


def inputs():
    torch.manual_seed(1)
    return torch.randn(TOKENS, 1, WIDTH, requires_grad=True), torch.randint(ENTRIES, (1, TOKENS))


def losses_and_gradients(model, hidden, labels, mask, rows):
    with TrainedRows(model).instead(rows):
        losses = model(hidden, labels)
    return losses.detach(), *torch.autograd.grad((losses * mask).sum(), (hidden, model.output_layer.weight))


@pytest.mark.parametrize("trained", [[0, 1, 1, 0, 0, 1, 0], [0] * 7, [0] * 6 + [1]])
def test_only_trained_tokens_are_multiplied_and_the_gradients_stay(trained):
    model, (hidden, labels) = Model(), inputs()
    mask = torch.tensor(trained, dtype=torch.float32)
    everything = losses_and_gradients(model, hidden, labels, mask, None)
    rows = rows_to_compute(mask, ENTRIES, WIDTH)
    found = losses_and_gradients(model, hidden, labels, mask, rows)
    assert model.output_layer.seen == [(TOKENS, False), (max(1, sum(trained)), False)]
    torch.testing.assert_close(found[0] * mask, everything[0] * mask)
    for one, other in zip(found[1:], everything[1:], strict=True):
        torch.testing.assert_close(one, other)


def test_the_model_is_as_before_behind_the_chunk_and_behind_an_error():
    model = Model(sequence_parallel=True)
    before = dict(vars(model)), dict(vars(model.output_layer))
    with contextlib.suppress(IndexError), TrainedRows(model).instead(torch.tensor([TOKENS])):
        assert not model.output_layer.sequence_parallel
        raise IndexError
    assert (dict(vars(model)), dict(vars(model.output_layer))) == before


def test_parts_of_ranks_are_gathered_before_rows_are_taken_and_the_layer_gathers_nothing(monkeypatch):
    gathered = []

    def gather(x, tensor_parallel_output_grad, group):
        gathered.append((tensor_parallel_output_grad, group))
        return torch.cat([x, 2 * x])

    monkeypatch.setattr(module, "gather_from_sequence_parallel_region", gather)
    model, (hidden, _) = Model(sequence_parallel=True), inputs()
    with TrainedRows(model).instead(torch.tensor([2, 9])):
        logits, _ = model.output_layer(hidden)
    assert gathered == [(False, "ranks")]
    assert model.output_layer.seen == [(2, False)]
    torch.testing.assert_close(logits, torch.stack([hidden[2], 2 * hidden[2]]) @ model.output_layer.weight.t())


def test_all_tokens_are_computed_where_the_copy_of_rows_would_outweigh_the_logits():
    mask = torch.ones(100)
    assert rows_to_compute(mask, 10**6, 1) is None
    mask[:20] = 0
    assert rows_to_compute(mask, 10, 10) is None
    assert rows_to_compute(mask, 40, 10).tolist() == list(range(20, 100))
    assert rows_to_compute(mask, 40, 11) is None


class OwnLoss(torch.nn.Module):
    """A model with Megatron's output layer and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.output_layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
        torch.nn.Module.__init__(self.output_layer)

    def compute_language_model_loss(self, labels, logits):
        return -7 * logits


class MegatronsLoss(OwnLoss):
    """A model with Megatron's output layer and loss."""

    compute_language_model_loss = LanguageModule.compute_language_model_loss


def test_models_with_a_loss_of_their_own_keep_all_tokens():
    assert trained_rows(OwnLoss()) is None
    assert trained_rows(types.SimpleNamespace()) is None
    assert trained_rows(MegatronsLoss()) is not None
