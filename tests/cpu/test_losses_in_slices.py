"""A loss of a batch and its gradient do not depend on how the batch is cut, packed, ordered or divided over replicas."""

import numpy as np
import pytest
import torch

from megatron_epp.losses import ClippedRatio
from megatron_epp.plan import Segment
from tests.support.runtime import loss_formulas
from tests.support.runtime.loss_formulas import LENGTHS, LOSSES, TOP, by_hand, formula, run_chunks, samples_for, trained_with
from tests.support.seeds import spread_by_default

batch, weight = pytest.fixture(scope="module")(loss_formulas.batch), pytest.fixture(loss_formulas.weight)
S = Segment
WHOLE = [[Segment(i, 0, n)] for i, n in enumerate(LENGTHS)]
CUTS = {
    "each whole": [[S(i, 0, n)] for i, n in enumerate(LENGTHS)],
    "all in one chunk": [[S(i, 0, n) for i, n in enumerate(LENGTHS)]],
    "backwards": [[S(i, 0, LENGTHS[i])] for i in (5, 4, 3, 2, 1, 0)],
    "two halves": [[S(0, 0, 6)], [S(0, 6, 13)], *[[S(i, 0, LENGTHS[i])] for i in range(1, 6)]],
    "tokens one by one": [[S(0, i, i + 1)] for i in range(13)] + [[S(i, 0, LENGTHS[i])] for i in range(1, 6)],
    "tail with others": [[S(0, 0, 5)], [S(0, 5, 10)], [S(0, 10, 13), S(1, 0, 4), S(4, 0, 1)], WHOLE[2] + WHOLE[3] + WHOLE[5]],
    "slice with others": [[S(0, 0, 5), S(1, 0, 4)], WHOLE[2], [S(0, 5, 13), S(3, 0, 2)], WHOLE[4] + WHOLE[5]],
    "two in slices": [[S(0, 0, 7)], [S(2, 0, 4)], [S(0, 7, 13), S(1, 0, 4)], [S(2, 4, 9), *WHOLE[3], *WHOLE[4]], WHOLE[5]],
    "in turn": [[S(2, 0, 3)], [S(2, 3, 9)], [S(5, 0, 3)], [S(5, 3, 7), S(4, 0, 1)], WHOLE[0] + WHOLE[1] + WHOLE[3]],
    "padded": [[S(0, 0, 6)], [S(0, 6, 13), S(1, 0, 4)], WHOLE[2] + WHOLE[3] + WHOLE[4] + WHOLE[5]],
}
"""Chunks of the batch, in the order of their forwards."""


@spread_by_default(3, name=LOSSES, cut=CUTS)  # a third of the cuts of every loss, and of the losses of every cut
def test_every_cut_has_the_loss_and_gradient_of_whole_sequences(batch, weight, name, cut):
    expected, gradient = by_hand(name, batch, weight)
    samples = samples_for(LOSSES[name], batch)
    total, found = trained_with(LOSSES[name], CUTS[cut], samples, weight, multiple=8 if cut == "padded" else 1)
    assert float(total[0] / total[1]) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)  # reports are in fp32
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_replicas_add_up_to_the_batch(batch, weight, name):
    _, gradient = by_hand(name, batch, weight)
    total, found = torch.zeros(2), torch.zeros_like(gradient)
    for share in (CUTS["two halves"][:5], CUTS["two halves"][5:]):
        sums, mean = trained_with(LOSSES[name], share, samples_for(LOSSES[name], batch), weight)
        total, found = total + sums[:2], found + mean * sums[1]
    torch.testing.assert_close(found / total[1], gradient, rtol=1e-12, atol=1e-13)


LOG_PROBABILITIES = ("old_logprobs", "reference_logprobs", "teacher_logprobs", "old_values", "returns")
OF_MASKED = (1e4, -1e4, -np.inf, np.nan, 1e-45)
OF_TRAINED = (1e4, -1e4, 1e-45)
TRAINED_HERE = 9
"""A token of the first sequence, in the second slice of most cuts."""


def extreme(batch, of_masked=None, of_trained=None, advantages=1.0):
    """Return the batch with these values of every column of log-probabilities or values: of tokens that are not trained, and of
    one that is."""
    changed = []
    for number, given in enumerate(batch):
        given = given | {"advantages": np.full(LENGTHS[number] + 1, advantages)}
        mask = given["trained"].copy()
        if number == 0:
            mask[TRAINED_HERE] = True
        for name in LOG_PROBABILITIES:
            values = given[name].copy()
            if of_masked is not None:
                values[~mask] = of_masked
            if of_trained is not None and number == 0:
                values[TRAINED_HERE] = of_trained
            given[name] = values
        changed.append(given | {"trained": mask})
    return changed


def of_random_model(loss):
    """Leaves ``[rows, length]`` in fp32 for every sequence, as a stage gives them."""
    random = torch.Generator().manual_seed(5)
    num_rows = 1 + (TOP if getattr(loss, "candidates", None) else 0) + bool(getattr(loss, "has_entropy", False))
    return [(-2.5 + torch.randn(num_rows, length, generator=random)).requires_grad_() for length in LENGTHS]


def in_float64(loss, leaves):
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    last = -1 if getattr(loss, "has_entropy", False) else 0
    return doubles, [(rows[0], rows[1 : 1 + TOP].t() if len(rows) > TOP else rows.t(), rows[last], rows[0]) for rows in doubles]


def run_leaves(loss, batch, leaves):
    """Run chunks of which these are the rows; return the sums to report, and what is said at the end."""

    def of_segment(segment, _):
        return leaves[segment.sequence][:, segment.start : segment.end]

    return run_chunks(loss, CUTS["tail with others"], samples_for(loss, batch), of_segment, torch.float32)


def assert_by_formula(name, batch, total, leaves, rtol):
    """The loss and the gradients of the rows are those of the formula, in float64."""
    doubles, of_model = in_float64(LOSSES[name], leaves)
    expected = formula(name, batch, of_model)
    expected.backward()
    assert float(total[0] / total[1]) == pytest.approx(float(expected.detach()), rel=rtol / 10, abs=1e-6)
    for leaf, x in zip(leaves, doubles, strict=True):
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        torch.testing.assert_close(leaf.grad / total[1], gradient.float(), rtol=rtol, atol=rtol / 100)


@pytest.mark.parametrize("value", OF_MASKED)
@pytest.mark.parametrize("name", LOSSES)
def test_no_value_of_a_token_that_is_not_trained_reaches_a_loss_or_gradient(batch, name, value):
    batch, leaves = extreme(batch, of_masked=value), of_random_model(LOSSES[name])
    total, problem = run_leaves(LOSSES[name], batch, leaves)
    assert problem == ""
    assert_by_formula(name, batch, total, leaves, rtol=1e-4)


UNBOUNDED = {
    (name, of_trained, sign)
    for name in LOSSES
    for of_trained in OF_TRAINED
    for sign in (1.0, -1.0)
    if (isinstance(LOSSES[name], ClippedRatio) and sign < 0 and of_trained == -1e4 and LOSSES[name].clip_negative is None)
    or (getattr(LOSSES[name], "kl", None) == "k3" and of_trained == 1e4)
    or (name == "GSPO" and sign < 0 and of_trained == -1e4)
    or ("not renormalised" in name and of_trained == 1e4 and not LOSSES[name].reverse)
}
"""Losses that have no finite value: a ratio, or a divergence, of e to the power of 10,000 (divided by 13 for GSPO)."""


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("value", OF_TRAINED)
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_values_of_trained_tokens_give_what_the_formula_gives_or_are_named(batch, name, value, sign):
    batch, leaves = extreme(batch, of_trained=value, advantages=sign), of_random_model(LOSSES[name])
    total, problem = run_leaves(LOSSES[name], batch, leaves)
    if (name, value, sign) in UNBOUNDED:
        assert f"the loss of token {TRAINED_HERE} of sample 0, or its gradient, is not finite" in problem
        assert f"{value:g}" in problem
        assert all(x.grad.isfinite().all() for x in leaves)  # nothing of it is in the gradients
        return
    assert problem == ""
    assert_by_formula(name, batch, total, leaves, rtol=1e-3)


@pytest.mark.parametrize("name", ["DAPO", "GSPO", "DPO"])
def test_what_a_model_gives_is_left_to_megatrons_checks(batch, name):
    """A NaN of the model stays one, which Megatron's loss scale and rerun machine wait for."""
    loss, leaves = LOSSES[name], of_random_model(LOSSES[name])
    with torch.no_grad():
        leaves[0][0, TRAINED_HERE - 1] = torch.nan
    total, problem = run_leaves(loss, extreme(batch), leaves)
    assert problem == ""
    assert total[0].isnan()
    assert leaves[0].grad.isnan().any()
