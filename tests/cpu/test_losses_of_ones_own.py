"""Losses of one's own and settings of those that ship: what makes no loss is refused by its name."""

import pytest
import torch

from megatron_epp import losses
from megatron_epp.data.samples import Samples, TokenSample, columns_of
from megatron_epp.losses import Average, ClippedRatio, NextToken, Preference, Rows, SequenceRatio
from megatron_epp.plan import EppError, Segment
from tests.support.calls import refusal
from tests.support.runtime.loss_formulas import LENGTHS, batch, samples_for, trained_with, weight

SAMPLE = {"tokens": [1, 2, 3], "reference_logprobs": 0.0, "preferred": 1.0}
SETTINGS = {
    "temperature of ClippedRatio is 0; it must be above 0": lambda: ClippedRatio(temperature=0),
    "temperature of SequenceRatio is -1; it must be above 0": lambda: SequenceRatio(temperature=-1),
    "temperature of Distillation is nan": lambda: losses.Distillation(temperature=float("nan")),
    "constant of ClippedRatio is 0; it must be above 0": lambda: ClippedRatio(constant=0),
    "clip_low of ClippedRatio is -0.2; it must be at least 0": lambda: ClippedRatio(clip_low=-0.2),
    "clip_high of SequenceRatio is -1; it must be at least 0": lambda: SequenceRatio(clip_high=-1),
    "clip_negative of ClippedRatio is 0.5; it must be above 1": lambda: ClippedRatio(clip_negative=0.5),
    "beta of Preference is 0; it must be above 0": lambda: Preference(beta=0, squared=True),
    "centre of Reward is -1; it must be at least 0": lambda: losses.Reward(centre=-1),
    "clip of ClippedValue is -0.1; it must be at least 0": lambda: losses.ClippedValue(clip=-0.1),
    "top_k of Distillation is 0; it must be at least 1": lambda: losses.Distillation(top_k=0),
}


@pytest.mark.parametrize("said", SETTINGS)
def test_settings_under_which_a_loss_is_none_are_refused(said):
    assert said in refusal(SETTINGS[said])


def own(call, *arguments, base=NextToken, **attributes):
    return type("OfOnesOwn", (base,), {"__call__": lambda self, rows: call(rows), **attributes})(*arguments)


OWN = {
    ".* reads old_logprobs, which is not in its columns": own(lambda rows: (rows.columns["old_logprobs"].sum(), {})),
    "returns a Tensor; it must return the sum and a dict of sums to log": own(lambda rows: -rows.logprobs.sum()),
    r"returns a tensor of shape \[": own(lambda rows: (-rows.logprobs, {})),
    "returns a loss without a graph: it must be computed": own(lambda rows: (-rows.logprobs.detach().sum(), {})),
    "does not depend on what the model gives: it trains nothing": own(lambda rows: (rows.weights.sum(), {})),
    r"is averaged by sequence means and does not depend on rows\.weights": own(
        lambda rows: (-rows.logprobs.sum(), {}), Average.SEQUENCE_MEANS
    ),
    r".* trained tokens of sample 0: RuntimeError: shape '\[-1, 10000\]' is invalid": own(
        lambda rows: (-rows.logprobs.reshape(-1, 10_000).sum(), {})
    ),
    "does not return entropy, which its attribute": own(lambda rows: (-rows.logprobs.sum(), {}), logged=("entropy",)),
    rf"fails at {__file__}:\d+, .*: rows\.sums, .* need Scope\.SEQUENCE": own(
        lambda rows: (rows.sums(rows.logprobs).sum(), {})
    ),
    r".* needs Scope\.GROUP": own(lambda rows: (rows.over_groups(rows.trained).sum(), {}), base=SequenceRatio),
}


@pytest.mark.parametrize("said", OWN)
def test_what_is_wrong_with_a_loss_of_ones_own_is_said_by_its_name(said):
    whole = [[Segment(i, 0, n)] for i, n in enumerate(LENGTHS)]
    with pytest.raises(EppError, match=f"loss OfOnesOwn {said}"):
        trained_with(OWN[said], whole, samples_for(OWN[said], batch()), weight())


@pytest.mark.parametrize("marks", [(1.0,), (1.0, 1.0), (1.0, 0.0, 0.0), (0.5, 0.5)])
def test_a_preference_is_of_two_samples_one_of_them_preferred(marks):
    given, asks = [SAMPLE | {"group": 3, "preferred": mark} for mark in marks], columns_of(Preference())
    with pytest.raises(EppError, match=f"group 3 has {len(marks)} samples; a preference is of two, preferred 1 for all"):
        Samples([TokenSample.of(one, asks, "a sample") for one in given], asks)


@pytest.mark.parametrize("group", [None, True, 1.5, [1]])
def test_a_group_is_an_integer_or_a_text(group):
    with pytest.raises(EppError, match="a sample: group must be an integer or a text, the same for samples with one loss"):
        TokenSample.of(SAMPLE | {"group": group}, columns_of(Preference()), "a sample")


def test_ratios_are_clipped_by_a_fifth_unless_said_otherwise():
    """Schulman et al. 2017, table 3."""
    assert (ClippedRatio().clip_low, ClippedRatio().clip_high) == (0.2, 0.2)


def test_what_a_policy_loss_logs_is_weighed_as_its_tokens_are():
    given = {"old_logprobs": [-1.0, -3.0], "advantages": [1.0, 1.0], "reference_logprobs": [-1.25, -2.5]}
    columns = {name: torch.tensor(values) for name, values in given.items()}
    rows = Rows(torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 3.0]), columns, torch.tensor([0.5, 1.5]), None, 0)
    _, logged = ClippedRatio(kl="k1", entropy_weight=0.1, constant=2.0)(rows)
    assert {name: round(float(value), 6) for name, value in logged.items()} == {
        "clipped share": 1.5,  # the second token's ratio, e, is above 1.2
        "divergence": 1.0 * 0.25 + 1.5 * 0.5,
        "entropy": 1.0 * 0.5 + 1.5 * 1.5,
    }
