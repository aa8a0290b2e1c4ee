"""Jobs of `test_inputs.py`: a program trains a model with a vision tower on samples with pictures, whole and in slices."""

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from tests.support.mcore.jobs.data_parallel import DataParallel
from tests.support.mcore.jobs.frameworks import HIDDEN, apart, begin, causal, refusal

SETTINGS = {"slices": 3, "wait_limit_seconds": 60}
PICTURES = {0: ((3, 3, 4), (17, 2, 3), (30, 5, 2)), 2: ((0, 4, 4),), 3: ((2, 1, 2),), 5: ((8, 4, 6), (32, 2, 2), (36, 3, 4))}
"""Of samples: the first token, height and width in patches of each of their pictures."""
LENGTHS = (44, 10, 24, 6, 18, 56)
PATCH = 12
STEPS = 6
"""More than those from which costs are learnt."""
PICTURE = 7
"""Token in the place of a picture's patches."""


class Tower(torch.nn.Module):
    """Patch embedding and layers of attention over the patches of one picture at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(PATCH, HIDDEN)
        layer = partial(torch.nn.TransformerEncoderLayer, HIDDEN, 2, 24, dropout=0.0, norm_first=True)
        self.layers = torch.nn.ModuleList([layer() for _ in range(2)])
        self.projection = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, patches: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return rows ``[patches, hidden]`` of ``[patches, PATCH]`` values, and as many for layers of the language model."""
        x, features = self.embedding(patches), []
        for layer in self.layers:
            x = layer(x)
            features.append(x.tanh())
        return self.projection(x), features


class VisionLanguage(torch.nn.Module):
    """A language model, and on the first stage a tower, whose features are added to the outputs of some first layers."""

    def __init__(self, language_model: Any, feature_layers: int = 0) -> None:
        super().__init__()
        self.feature_layers = feature_layers
        self.config, self.model_type, self.vp_stage = language_model.config, language_model.model_type, language_model.vp_stage
        self.language_model = language_model
        self.pre_process, self.share_embeddings_and_output_weights = language_model.pre_process, False
        if language_model.pre_process:
            self.vision_model = Tower()

    def forward(self, tokens: Tensor, pictures: Any, positions: Tensor, labels: Tensor) -> Tensor:
        """Return losses of one sample, of whose pictures the first tokens and patches are given."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

        rows, hooks = None, []
        if self.language_model.pre_process:
            rows = self.language_model.embedding(tokens, positions)
            if self.config.sequence_parallel:
                rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False)
            seen = [(start, *self.vision_model(patches)) for start, patches in pictures]
            entering = [merged(rows, [(start, own) for start, own, _ in seen])]
            for layer in range(self.feature_layers):
                entering.append(merged(torch.zeros_like(rows), [(start, features[layer]) for start, _, features in seen]))
            if self.config.sequence_parallel:
                entering = [scatter_to_sequence_parallel_region(part) for part in entering]
            rows, *features = entering
            for layer, more in zip(self.language_model.decoder.layers, features, strict=False):
                hooks.append(layer.register_forward_hook(lambda _, args, output, more=more: (output[0] + more, output[1])))
        output = self.language_model(tokens, positions, causal(tokens.shape[1]), decoder_input=rows, labels=labels)
        for hook in hooks:
            hook.remove()
        return output

    def set_input_tensor(self, tensors: Any) -> None:
        self.language_model.set_input_tensor(tensors)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.language_model.shared_embedding_or_output_weight()


def merged(rows: Tensor, pictures: Any) -> Tensor:
    for start, features in pictures:
        rows = torch.cat([rows[:start], features[:, None], rows[start + len(features) :]])
    return rows


def inputs(chunk: Any) -> Tensor:
    assert all((chunk.tokens[0, span.start : span.start + span.num_tokens] == PICTURE).all() for span in chunk.spans)
    rows = chunk.embedded()
    if chunk.columns:
        rows = rows * chunk.columns["volume"][:, None, None]
    seen = [(span.start, *chunk.model.vision_model(span.payload)) for span in chunk.spans]
    own = merged(rows, [(start, own) for start, own, _ in seen])
    layers = range(chunk.model.feature_layers)
    more = [merged(torch.zeros_like(rows), [(start, features[at]) for start, _, features in seen]) for at in layers]
    return (own, more) if more else own


def dropout() -> dict[str, Any]:
    """Return whether ranks that share tokens get the same rows of an embedding with dropout, and the share that is dropped."""
    (model,) = begin(LENGTHS, tensor_parallel=2, sequence_parallel=True).models
    model.embedding.embedding_dropout.p = 0.5
    from megatron_epp.mcore.model.own_inputs import InputChunk

    rows = InputChunk(model, torch.arange(40)[None], torch.arange(40)[None], {}, (), model).embedded().detach()
    of_ranks = [torch.empty_like(rows) for _ in range(2)]
    dist.all_gather(of_ranks, rows)
    return {"equal": torch.equal(*of_ranks), "dropped": float((rows == 0).float().mean())}


def samples(axes: int = 1) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(4)
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(8, 64, (length + 1,), generator=random)
        positions, spans = torch.arange(length + 1)[:, None].repeat(1, 3), []
        for start, height, width in PICTURES.get(number, ()):
            size = height * width
            tokens[start : start + size] = PICTURE
            at = torch.stack([torch.zeros(size), torch.arange(size) // width, torch.arange(size) % width], dim=1).long()
            positions[start : start + size] = start + at
            payload = torch.randn(size, PATCH, generator=random)
            spans.append({"start": start, "tokens": size, "work": 2.0 * size, "kept": 2.0 * size, "payload": payload})
        sample = {"tokens": tokens, "trained": (tokens != PICTURE).int(), "spans": spans}
        made.append(sample | ({"positions": positions} if axes > 1 else {}))
    return made


def whole_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    sample = next(data)
    tokens, mask = sample["tokens"][None], sample["trained"][1:].float()
    positions = torch.arange(tokens.shape[1] - 1)[None]
    if "positions" in sample:
        positions = sample["positions"][:-1].T[:, None]
    pictures = [(span["start"], span["payload"]) for span in sample["spans"]]
    losses = model(tokens[:, :-1], pictures, positions, tokens[:, 1:])
    return losses, lambda output: ((output[0] * mask).sum(), mask.sum().int(), {"loss": (output[0] * mask).sum().detach()})


class Training(DataParallel):
    def stepped(self) -> tuple[list[Tensor], list[tuple[list[Tensor], float]], list[Tensor]]:
        """Return weights before steps by Megatron's schedule, gradients and losses of each, and weights after them."""
        start, results = self.weights(), []
        for _ in range(STEPS):
            gradients, losses = self.whole()
            results.append((gradients, sum(float(loss["loss"]) for loss in losses)))
            self.step()
        return start, results, self.weights()


Steps = tuple[list[Tensor], list[tuple[list[Tensor], float]], list[Tensor]]
"""Weights before steps by Megatron's schedule, gradients and losses of each, and weights after them."""


def compared(training: Training, steps: Steps, inputs: Any, plans: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return how far steps in slices, with a function that makes input rows, are from results of `Training.stepped`."""
    from megatron.core import parallel_state

    start, expected, after = steps
    training.load(start)
    schedule = megatron_epp.wrap_samples(inputs=inputs, **SETTINGS | dict(plans or {}))
    evaluated = schedule(model=training.chunks, samples=training.samples, forward_only=True)
    reports, worst = [], 0.0
    for number in range(STEPS):
        if number:  # planned with other payloads, which the call does not take
            stale = [one | {"spans": [span | {"payload": None} for span in one["spans"]]} for one in training.samples]
            schedule.plan_ahead(model=training.chunks, samples=stale)
        gradients, report = training.sliced(schedule)
        reports.append(report)
        worst = max(worst, apart(gradients, expected[number][0]))
        training.step()
    schedule.close()
    encoders = [w for chunk in training.chunks for name, w in chunk.named_parameters() if "language_model" not in name]
    return {
        "worst": worst,
        "weights": apart(training.weights(), after),
        "losses": [report.means["next token"] * report.divisor for report in reports],
        "evaluated": evaluated.means["next token"] * evaluated.divisor,
        "expected": [loss for _, loss in expected],
        "replica": parallel_state.get_data_parallel_rank(),
        "chunks": reports[0].num_chunks,
        "trained encoder": sum(float(weight.main_grad.norm()) for weight in encoders if weight.requires_grad),
    }


def _read(folder: Path, stages: Iterable[int]) -> Steps:
    """Return what `Training.stepped` returned on ranks of one stage each, for a rank with several stages."""
    starts, results, afters = zip(*(torch.load(Path(folder, f"{stage}.pt")) for stage in stages), strict=True)
    pairs = (zip(*of_stages, strict=True) for of_stages in zip(*results, strict=True))
    steps = [([*chain(*gradients)], sum(losses)) for gradients, losses in pairs]
    return [*chain(*starts)], steps, [*chain(*afters)]


def pictures(
    replicas: int = 1,
    stages: int | None = None,
    frozen: str = "",
    plans: Mapping[str, Any] | None = None,
    axes: int = 1,
    feature_layers: int = 0,
    overlaps: bool = False,
    written: Path | None = None,
    read: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return how far trainings in slices are from one by Megatron's schedule.

    Args:
        frozen: part of the names of parameters that do not train.
        axes: of positions; 3 for M-RoPE.
        feature_layers: layers behind which features of the tower are added, from the first.
        written, read: folder for what Megatron's schedule does, for a job with ranks that it does not know, which reads it.
    """
    if axes > 1:
        settings |= {"positions": "mrope", "mrope_section": [2, 1, 1]}
    loop = begin(LENGTHS, stages, replicas=replicas, calculate_per_token_loss=True, **settings)
    from megatron.core import parallel_state

    torch.manual_seed(3)
    models = [VisionLanguage(model, feature_layers) for model in loop.models]
    for name, weight in chain.from_iterable(model.named_parameters() for model in models):
        weight.requires_grad_(not frozen or frozen not in name)
    training = Training(loop, samples(axes), whole_step, models, overlaps=overlaps)
    plans = dict(plans or {}) | {"feature_layers": tuple(range(feature_layers))}
    rank, ranks = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size()
    steps = training.stepped() if read is None else _read(read, range(rank, stages or ranks, ranks))
    if written is not None:
        torch.save(steps, Path(written, f"{rank}.pt"))
    return compared(training, steps, inputs, plans)


def refusals() -> dict[str, str]:
    """Return what is said of samples and functions that cannot be honoured, and whether right ones train afterwards."""
    model, said, right = VisionLanguage(begin(LENGTHS, calculate_per_token_loss=True).models[0]), {}, samples()

    def told(name: str, batch: Any = right, **settings: Any) -> None:
        def train() -> None:
            with contextlib.closing(megatron_epp.wrap_samples(**SETTINGS | settings)) as schedule:
                schedule(model=model, samples=batch)

        said[name] = refusal(train) or "trains"

    first, *others = right
    told("no function")
    told("columns without a function", [], input_columns=["volume"])
    told("features without a function", [], feature_layers=(0, 1))
    told("no column", inputs=inputs, input_columns=["volume"])
    told("a span beyond the end", [first | {"spans": [{"start": 40, "tokens": 5}]}, *others], inputs=inputs)
    told("forced", inputs=inputs, slices=None, chunk_tokens=8)
    told("another planner", inputs=inputs, planner="seq1f1b", slices=None, chunk_tokens=25)
    told("rows of another shape", inputs=lambda chunk: inputs(chunk)[:, 0])
    told("positions", [one | {"positions": [[0, 0, 0]] * len(one["tokens"])} for one in right], inputs=inputs)
    told("features behind the first stage", inputs=inputs, feature_layers=(0, 4))
    told("no features", inputs=inputs, feature_layers=(0,))
    told("right", inputs=inputs)
    return said
