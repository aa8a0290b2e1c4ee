"""A loss of a batch and its gradient do not depend on how the batch is cut, packed, ordered or divided over replicas."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax, softplus

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.samples import Samples, TokenSample, columns_of
from megatron_epp.features.losses.scopes import ScopedLoss
from megatron_epp.losses import (
    Average,
    ClippedRatio,
    ClippedValue,
    Distillation,
    NextToken,
    Preference,
    Reward,
    Rows,
    Scope,
    SequenceRatio,
)
from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.planner.order import joint_losses
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from megatron_epp.runtime.context import ChunkContext
from tests.support.calls import refusal
from tests.support.seeds import spread_by_default

VOCABULARY, WIDTH, TOP = 11, 5, 3
LENGTHS = (13, 4, 9, 2, 1, 7)
RANKS = torch.arange(1, TOP + 1, dtype=torch.float64)


@dataclass(frozen=True)
class MeanValue:
    """Squared error of every sequence's mean value, which no token's error gives."""

    name = "mean value"
    scope = Scope.SEQUENCE
    average = Average.SEQUENCES
    columns = ("returns",)
    logged = ()
    has_values = True

    def __call__(self, rows):
        error = rows.means(rows.values) - rows.means(rows.columns["returns"])
        return (rows.trained * error.square()).sum(), {}


@dataclass(frozen=True)
class SequenceDistillation:
    """Squared mean of what a sequence's tokens give to a teacher's first, second and third token, and of entropies."""

    name = "distillation of sequences"
    scope = Scope.SEQUENCE
    average = Average.SEQUENCES
    columns = ("importance", "teacher_tokens")
    candidates = "teacher_tokens"
    logged = ()
    has_entropy = True
    widths = {"teacher_tokens": TOP}  # noqa: RUF012

    def __call__(self, rows):
        each = rows.columns["importance"] * (rows.candidate_logprobs @ RANKS.to(rows.weights.dtype)) + rows.entropy
        return (rows.trained * rows.means(each).square()).sum(), {}


LOSSES = {
    "tokens": NextToken(),
    "weighted tokens": NextToken(weight_column="importance"),
    "sums of sequences": NextToken(Average.SEQUENCES),
    "means of sequences": NextToken(Average.SEQUENCE_MEANS),
    "DAPO": ClippedRatio(clip_high=0.28, has_importance=True, clip_negative=3.0),
    "GRPO, k1": ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k1", kl_weight=0.1),
    "GRPO, k2": ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k2", kl_weight=0.1),
    "GRPO, k3": ClippedRatio(average=Average.SEQUENCE_MEANS, kl="k3", kl_weight=0.1),
    "PPO, entropy": ClippedRatio(entropy_weight=0.05),
    "Dr. GRPO": ClippedRatio(average=Average.SEQUENCES, constant=16.0),
    "GSPO": SequenceRatio(clip_low=0.05, clip_high=0.05),
    "distillation": Distillation(TOP),
    "distillation, sequence means": Distillation(TOP, average=Average.SEQUENCE_MEANS),
    "reverse distillation": Distillation(TOP, reverse=True),
    "distillation, not renormalised": Distillation(TOP, renormalizes=False),
    "reverse distillation, not renormalised": Distillation(TOP, reverse=True, renormalizes=False),
    "distillation of sequences": SequenceDistillation(),
    "values": ClippedValue(),
    "values, sequence means": ClippedValue(clip=0.1, average=Average.SEQUENCE_MEANS),
    "values, not clipped": ClippedValue(clip=None),
    "mean value": MeanValue(),
    "DPO": Preference(),
    "DPO, smoothed": Preference(beta=0.5, label_smoothing=0.1),
    "IPO": Preference(beta=0.3, squared=True),
    "SimPO": Preference(beta=2.0, has_reference=False, by_length=True, target=0.7),
    "reward": Reward(),
    "reward, centred": Reward(centre=0.01),
}
GROUPS = ("a", 7, "a", 7, "c", "c")
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


@pytest.fixture(scope="module")
def batch():
    """Samples as a user gives them; a loss of values does not get their last tokens, so that all have the same lengths."""
    random, more = np.random.RandomState(0), np.random.RandomState(1)
    samples = []
    for number, length in enumerate(LENGTHS):
        given = {
            "tokens": random.randint(0, VOCABULARY, length + 1),
            "trained": (random.rand(length + 1) < 0.7) & (number != 3),  # one sequence trains nothing
            "old_logprobs": -2.4 + 0.3 * random.randn(length + 1),
            "reference_logprobs": -2.4 + 0.3 * random.randn(length + 1),
            "importance": random.rand(length + 1) + 0.5,
            "advantages": random.randn() if number % 2 else random.randn(length + 1),
            "teacher_tokens": np.stack([more.permutation(VOCABULARY)[:TOP] for _ in range(length + 1)]),
            "teacher_logprobs": -1.5 - more.rand(length + 1, TOP),
            "old_values": 0.5 * more.randn(length + 1),
            "returns": more.randn(length + 1),
            "preferred": float(number in (2, 1, 4)),
        }
        samples.append({name: np.asarray(values) for name, values in given.items()} | {"group": np.asarray(GROUPS[number])})
    return samples


def has_values(loss):
    return getattr(loss, "has_values", False)


def samples_for(loss, batch):
    cut = ({key: x[:-1] if x.ndim and has_values(loss) else x for key, x in given.items()} for given in batch)
    return [TokenSample.of(given, columns_of(loss), "a sample") for given in cut]


@pytest.fixture
def weight():
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)


HIDDEN = [torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def outputs(weight, segment):
    """Logarithms of the probabilities of all entries under an output layer, and outputs of a value head: its first row."""
    hidden = HIDDEN[segment.sequence][segment.start : segment.end]
    return log_softmax(hidden @ weight.t(), dim=1), hidden @ weight[0]


def rows_of(loss, weight, segment, tokens, candidates):
    """Return ``[rows, tokens]`` of a segment, as a stage gives them."""
    logprobs, values = outputs(weight, segment)
    if has_values(loss):
        return values[None]
    labels = torch.from_numpy(tokens[segment.start + 1 : segment.end + 1])[:, None]
    rows = logprobs.gather(1, labels if candidates is None else torch.cat([labels, candidates], dim=1)).t()
    return torch.cat([rows, -(logprobs.exp() * logprobs).sum(1)[None]]) if getattr(loss, "has_entropy", False) else rows


def trained_with(loss, chunks, samples, weight, multiple=1):
    """Run chunks forward in order, then backward in the opposite one; return the sums to report, and the gradient."""
    weight.grad = None

    def of_segment(segment, candidates):
        return rows_of(loss, weight, segment, samples[segment.sequence].tokens, candidates)

    total, problem = run_chunks(loss, chunks, samples, of_segment, torch.float64, multiple)
    assert problem == ""
    return total, weight.grad / total[1]


def run_chunks(loss, chunks, samples, of_segment, dtype, multiple=1):
    """Run chunks forward in order, then backward in the opposite one; return the sums to report, and what is said at the end.

    `of_segment` gives the rows of a segment, with those of candidates ``[tokens, k]``.
    """
    scoped, total, ran = ScopedLoss(loss), None, []
    dataset = Samples(samples, scoped.asks)
    group_of = {index: number for number, group in enumerate(dataset.groups) for index in group}
    numbers = tuple(group_of[index] for index in range(len(samples))) if group_of else ()
    batch = GlobalBatch(indices=tuple(range(len(samples))), lengths=LENGTHS, loss_groups=numbers, dataset=dataset)
    scoped.name_of = batch.name_of
    together = {c: group for group in joint_losses([Chunk(tuple(own)) for own in chunks], numbers) for c in group}
    for number, segments in enumerate(chunks):
        chunk = Chunk(tuple(segments))
        padded = chunk.padded_tokens(multiple)
        sliced = chunk.slice_of(LENGTHS)
        view = None if sliced is None else SliceView(*sliced, LENGTHS[sliced.sequence], LENGTHS[sliced.sequence])
        table = SegmentTable.build(chunk, padded)
        context = ChunkContext(number, table, SlicedKVCache(), view, loss_group=together.get(number, ()))
        arrays, all_tokens = batch.chunk_of(segments, multiple, of_loss=scoped.asks), (slice(0, padded),)
        inputs = arrays.of_loss.of_trained([all_tokens], all_tokens)
        inputs = inputs._replace(weights=inputs.weights.to(dtype), columns=inputs.columns.to(dtype))
        candidates, rows, at = scoped.candidates(inputs, padded), [], 0
        for one in segments:
            here = slice(at, at := at + one.end - one.start)
            given = None if candidates is None else candidates[here]
            rows.append(of_segment(one, given))
        values = torch.cat([*rows, rows[0].new_zeros(len(rows[0]), padded - at)], dim=1)
        output, sums = scoped.forward(context, values, inputs, arrays.loss_mask)
        ran.append((number, output))
        total = sums if total is None else total + sums
    for number, output in reversed(ran):
        torch.autograd.backward(output, scoped.gradient(number))
    return total, scoped.end()


def squared_errors(clip, values, old, returns):
    each = (values - returns) ** 2 / 2
    if clip is None:
        return each
    return torch.maximum(each, (torch.minimum(torch.maximum(values, old - clip), old + clip) - returns) ** 2 / 2)


def divergences(loss, p, q):
    """Of logarithms of distributions over the teacher's tokens, ``[tokens, k]``: the model's and the teacher's."""
    if loss.renormalizes:
        q, p = q - q.logsumexp(1, keepdim=True), p - p.logsumexp(1, keepdim=True)
    return (p.exp() * (p - q)).sum(1) if loss.reverse else (q.exp() * (q - p)).sum(1)


def columns_in(given, of_tokens, length):
    whole = {key: x if x.ndim else x.repeat(length + 1) for key, x in given.items() if key != "group"}
    return {key: torch.from_numpy(x[of_tokens].astype(np.float32)).double() for key, x in whole.items()}


def model_outputs(weight, batch):
    """Outputs of a model for every sequence: logarithms of the probabilities of labels and of a teacher's tokens, entropies,
    and values."""
    for number, given in enumerate(batch):
        logits, values = outputs(weight, Segment(number, 0, LENGTHS[number]))
        labels, others = torch.from_numpy(given["tokens"][1:])[:, None], torch.from_numpy(given["teacher_tokens"][1:])
        yield logits.gather(1, labels)[:, 0], logits.gather(1, others), -(logits.exp() * logits).sum(1), values


def by_hand(name, batch, weight):
    """The batch's loss and its gradient, written down for whole sequences, without what is under test."""
    weight.grad = None
    mean = formula(name, batch, model_outputs(weight, batch))
    mean.backward()
    return mean.detach(), weight.grad.clone()


def formula(name, batch, of_model):
    """The batch's loss, of trained tokens only, in float64."""
    loss = LOSSES[name]
    if loss.scope is Scope.GROUP:
        return of_pairs(loss, batch, of_model)
    sums, counts = [], []
    for number, (given, of_sequence) in enumerate(zip(batch, of_model, strict=True)):
        length = LENGTHS[number]
        of_tokens = slice(0, length) if has_values(loss) else slice(1, length + 1)
        mask = torch.from_numpy(given["trained"][of_tokens])
        if not mask.any():
            continue
        column = {key: x[mask] for key, x in columns_in(given, of_tokens, length).items()}
        each = of_each(name, column, *(x[mask] for x in of_sequence))
        share = float(np.float32(1) / np.float32(mask.sum()))  # weights travel in fp32
        sums.append(each.sum() * share if loss.average is Average.SEQUENCE_MEANS else each.sum())
        counts.append(float(mask.sum()) if loss.average is Average.TOKENS else 1.0)
    return torch.stack(sums).sum() / sum(counts)


def of_each(name, column, values, of_teacher, entropy, outputs_of_head):
    """Losses of a sequence's trained tokens, or the one of a loss that is computed over the sequence."""
    loss = LOSSES[name]
    if name == "mean value":
        return (outputs_of_head - column["returns"]).mean().square()
    if name == "distillation of sequences":
        of_tokens = of_teacher[:, 0] + 2 * of_teacher[:, 1] + 3 * of_teacher[:, 2]
        return (column["importance"] * of_tokens + entropy).mean().square()
    if name == "GSPO":
        ratio, advantage = ratios((values - column["old_logprobs"]).mean()), column["advantages"].mean()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
    if isinstance(loss, ClippedValue):
        return squared_errors(loss.clip, outputs_of_head, column["old_values"], column["returns"])
    if isinstance(loss, Distillation):
        return divergences(loss, of_teacher, column["teacher_logprobs"])
    if isinstance(loss, NextToken):
        return -values * (column["importance"] if name == "weighted tokens" else 1.0)
    ratio, a = ratios(values - column["old_logprobs"]), column["advantages"]
    each = -torch.minimum(ratio * a, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * a)
    if name == "PPO, entropy":
        each = each - 0.05 * entropy
    if name == "DAPO":
        each = torch.where(a < 0, torch.minimum(each, -3.0 * a), each) * column["importance"]
    if loss.kl:
        d = column["reference_logprobs"] - values
        each = each + 0.1 * {"k1": -d, "k2": 0.5 * d * d, "k3": d.exp() - 1 - d}[loss.kl]
    return each / loss.constant


def ratios(exponents):
    """In float64 a ratio of e^700 is finite, and far above any clip."""
    return exponents.clamp(max=700).exp()


def of_pairs(loss, batch, of_model):
    """Mean loss of the three pairs. The second one's other sample trains nothing."""
    scores = []
    for number, (given, of_sequence) in enumerate(zip(batch, of_model, strict=True)):
        of_tokens = slice(0, LENGTHS[number]) if has_values(loss) else slice(1, LENGTHS[number] + 1)
        mask = torch.from_numpy(given["trained"][of_tokens])
        values = of_sequence[3 if has_values(loss) else 0][mask]
        if not has_values(loss) and loss.has_reference:
            values = values - columns_in(given, of_tokens, LENGTHS[number])["reference_logprobs"][mask]
        scores.append(values.sum() / mask.sum().clamp(min=1) if has_values(loss) or loss.by_length else values.sum())
    losses = []
    for better, worse in ((2, 0), (1, 3), (4, 5)):
        margin = scores[better] - scores[worse]
        if has_values(loss):
            losses.append(softplus(-margin) + loss.centre * (scores[better] + scores[worse]) ** 2)
        elif loss.squared:
            losses.append((margin - 0.5 / loss.beta) ** 2)
        else:
            x, wrong = loss.beta * margin - loss.target, loss.label_smoothing
            losses.append((1 - wrong) * softplus(-x) + wrong * softplus(x))
    return sum(losses) / 3


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


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_of_a_trained_token_that_is_not_finite_is_refused(batch, value):
    given = extreme(batch, of_trained=value)[0]
    with pytest.raises(EppError, match=f"sample 0: old_logprobs is {value} for token {TRAINED_HERE}, which is trained"):
        TokenSample.of(given, columns_of(LOSSES["DAPO"]), "sample 0")


SETTINGS = {
    "temperature of ClippedRatio is 0; it must be above 0": lambda: ClippedRatio(temperature=0),
    "temperature of SequenceRatio is -1; it must be above 0": lambda: SequenceRatio(temperature=-1),
    "temperature of Distillation is nan": lambda: Distillation(temperature=float("nan")),
    "constant of ClippedRatio is 0; it must be above 0": lambda: ClippedRatio(constant=0),
    "clip_low of ClippedRatio is -0.2; it must be at least 0": lambda: ClippedRatio(clip_low=-0.2),
    "clip_high of SequenceRatio is -1; it must be at least 0": lambda: SequenceRatio(clip_high=-1),
    "clip_negative of ClippedRatio is 0.5; it must be above 1": lambda: ClippedRatio(clip_negative=0.5),
    "beta of Preference is 0; it must be above 0": lambda: Preference(beta=0, squared=True),
    "centre of Reward is -1; it must be at least 0": lambda: Reward(centre=-1),
    "clip of ClippedValue is -0.1; it must be at least 0": lambda: ClippedValue(clip=-0.1),
    "top_k of Distillation is 0; it must be at least 1": lambda: Distillation(top_k=0),
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
def test_what_is_wrong_with_a_loss_of_ones_own_is_said_by_its_name(batch, weight, said):
    with pytest.raises(EppError, match=f"loss OfOnesOwn {said}"):
        trained_with(OWN[said], CUTS["each whole"], samples_for(OWN[said], batch), weight)


@pytest.mark.parametrize("marks", [(1.0,), (1.0, 1.0), (1.0, 0.0, 0.0), (0.5, 0.5)])
def test_a_preference_is_of_two_samples_one_of_them_preferred(batch, marks):
    given = [batch[1] | {"group": 3, "preferred": mark, "reference_logprobs": 0.0} for mark in marks]
    asks = columns_of(Preference())
    with pytest.raises(EppError, match=f"group 3 has {len(marks)} samples; a preference is of two, preferred 1 for all"):
        Samples([TokenSample.of(one, asks, "a sample") for one in given], asks)


@pytest.mark.parametrize("group", [None, True, 1.5, [1]])
def test_a_group_is_an_integer_or_a_text(batch, group):
    with pytest.raises(EppError, match="a sample: group must be an integer or a text, the same for samples with one loss"):
        TokenSample.of(batch[1] | {"group": group}, columns_of(Preference()), "a sample")


def test_ratios_are_clipped_by_a_fifth_unless_said_otherwise():
    """Schulman et al. 2017, table 3."""
    assert (ClippedRatio().clip_low, ClippedRatio().clip_high) == (0.2, 0.2)


def test_what_a_policy_loss_logs_is_weighed_as_its_tokens_are():
    columns = {name: torch.tensor(values) for name, values in POLICY_COLUMNS.items()}
    rows = Rows(torch.tensor([-1.0, -2.0]), torch.tensor([2.0, 3.0]), columns, torch.tensor([0.5, 1.5]), None, 0)
    _, logged = ClippedRatio(kl="k1", entropy_weight=0.1, constant=2.0)(rows)
    assert {name: round(float(value), 6) for name, value in logged.items()} == {
        "clipped share": 1.5,  # the second token's ratio, e, is above 1.2
        "divergence": 1.0 * 0.25 + 1.5 * 0.5,
        "entropy": 1.0 * 0.5 + 1.5 * 1.5,
    }


POLICY_COLUMNS = {"old_logprobs": [-1.0, -3.0], "advantages": [1.0, 1.0], "reference_logprobs": [-1.25, -2.5]}
