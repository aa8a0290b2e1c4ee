"""Losses over a small batch: by chunks as stages run them, and by formulas for whole sequences, in float64."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import log_softmax, softplus

from megatron_epp import losses
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.samples import Samples, TokenSample, columns_of
from megatron_epp.features.losses.scopes import ScopedLoss
from megatron_epp.losses import Average, ClippedRatio, ClippedValue, Distillation, NextToken, Scope
from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.order import joint_losses
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from megatron_epp.runtime.context import ChunkContext

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
    "GSPO": losses.SequenceRatio(clip_low=0.05, clip_high=0.05),
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
    "DPO": losses.Preference(),
    "DPO, smoothed": losses.Preference(beta=0.5, label_smoothing=0.1),
    "IPO": losses.Preference(beta=0.3, squared=True),
    "SimPO": losses.Preference(beta=2.0, has_reference=False, by_length=True, target=0.7),
    "reward": losses.Reward(),
    "reward, centred": losses.Reward(centre=0.01),
}
GROUPS = ("a", 7, "a", 7, "c", "c")


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
    """Takes logarithms of distributions over the teacher's tokens, ``[tokens, k]``: the model's and the teacher's."""
    if loss.renormalizes:
        q, p = q - q.logsumexp(1, keepdim=True), p - p.logsumexp(1, keepdim=True)
    return (p.exp() * (p - q)).sum(1) if loss.reverse else (q.exp() * (q - p)).sum(1)


def columns_in(given, of_tokens, length):
    whole = {key: x if x.ndim else x.repeat(length + 1) for key, x in given.items() if key != "group"}
    return {key: torch.from_numpy(x[of_tokens].astype(np.float32)).double() for key, x in whole.items()}


def model_outputs(weight, batch):
    """Yield logarithms of the probabilities of a sequence's labels and of a teacher's tokens, entropies, and values."""
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
    pairs = []
    for better, worse in ((2, 0), (1, 3), (4, 5)):
        margin = scores[better] - scores[worse]
        if has_values(loss):
            pairs.append(softplus(-margin) + loss.centre * (scores[better] + scores[worse]) ** 2)
        elif loss.squared:
            pairs.append((margin - 0.5 / loss.beta) ** 2)
        else:
            x, wrong = loss.beta * margin - loss.target, loss.label_smoothing
            pairs.append((1 - wrong) * softplus(-x) + wrong * softplus(x))
    return sum(pairs) / 3
