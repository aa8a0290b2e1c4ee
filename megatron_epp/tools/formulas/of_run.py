"""Answers to a training that knows no formulas (`port.run_facts`): costs of its pipeline, its layout, what its latents do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan.errors import EppError, as_setting
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.problem import Lengths, Problem
from megatron_epp.plan.yaml_files import find
from megatron_epp.planner.latents_choice import LatentsChoice, LatentsTrial, choose_latents
from megatron_epp.port.run_facts import AttentionSizes, CostsFile, LayoutAnswer, LayoutQuestion, RunFacts
from megatron_epp.tools.formulas import parameters
from megatron_epp.tools.formulas.analytic import profile_for
from megatron_epp.tools.formulas.device import on_device, shard_bytes
from megatron_epp.tools.formulas.hardware import CPU, H100_NODE
from megatron_epp.tools.formulas.library import balanced_layers, load_costs, shape_of
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import Profile
from megatron_epp.tools.layouts.layout_choice import Sample, settle


def attention_sizes(facts: RunFacts) -> AttentionSizes:
    shape = model_shape(facts)
    return AttentionSizes(*(getattr(shape, name) for name in AttentionSizes._fields))


def model_shape(facts: RunFacts) -> ModelShape:
    """Return the model's shape. Blocks of the loss are the last stage's matter, unless all ranks have the output layer."""
    tokens = facts.loss_block_tokens if facts.flags.get("epp_vocab_parallel") == "on" else 0
    return shape_of({**facts.flags, "vocab_size": facts.flags["padded_vocab_size"], "epp_loss_block_tokens": tokens})


def read_costs(file: CostsFile) -> Profile | PipelineCosts:
    """Read a profile, or costs of a pipeline. Raises `EppError` if the file does not exist, or contains neither."""
    try:
        path = find("profiles", file.name)
    except EppError as error:
        raise EppError(f"{as_setting(file.setting, file.name)}: {error}. Or give analytic or learn") from error
    return load_costs(str(path))


def pipeline_costs_in(file: CostsFile) -> PipelineCosts | None:
    """Return the costs of a pipeline that a file has; None if it has a profile. Raises as `read_costs` does."""
    costs = read_costs(file)
    return costs if isinstance(costs, PipelineCosts) else None


def prior(
    facts: RunFacts,
    file: CostsFile | None,
    layers: Sequence[int],
    trained: Sequence[float | None],
    vocabulary_shares: tuple[float, ...] = (),
    has_static: bool = False,
) -> tuple[PipelineCosts, LinearTime]:
    """Return costs of a run's pipeline, and of the output layer's weight gradient, by the share of each stage that trains."""
    profile, replicas = _profile(facts, file), facts.flags["data_parallel_size"]

    def of(share: float) -> PipelineCosts:
        held = replace(facts.optimizer, trained_share=share) if has_static else None
        return profile.training(share).costs(layers, optimizer=held, replicas=replicas, vocabulary_shares=vocabulary_shares)

    costs = {share: of(share or 0.0) for share in {*trained, 1.0}}
    stages = (costs[share].stages[number] for number, share in enumerate(trained))
    own = (stage.without_backward() if share is None else stage for stage, share in zip(stages, trained, strict=True))
    return replace(costs[1.0], stages=tuple(own)), costs[1.0].stages[-1].line_of_ends("weight")


def _profile(facts: RunFacts, file: CostsFile | None, shape: ModelShape | None = None) -> Profile:
    measured = None if file is None else read_costs(file)
    assert not isinstance(measured, PipelineCosts)  # which a training takes as they are
    # Any GPU counts as an H100: `learn` corrects times by the first iterations, and a file has the machine's own.
    rates = CPU if facts.kernel is None else replace(H100_NODE, attention_kernel=facts.kernel)
    return profile_for(measured, shape or model_shape(facts), rates)


def with_device_memory(facts: RunFacts, costs: PipelineCosts, buffers: Sequence[int] | None = None) -> PipelineCosts:
    """Add the bytes that shards of the output layer hold, and on GPUs the memory that autograd does not keep (`on_device`)."""
    shape, share = model_shape(facts), facts.flags.get("epp_fragmentation_share")
    if costs.vocabulary is not None:
        blocks = replace(shape, loss_block_tokens=facts.loss_block_tokens)
        held = shard_bytes(blocks, fused_accumulation=bool(facts.flags.get("gradient_accumulation_fusion")))
        costs = replace(costs, vocabulary=replace(costs.vocabulary, **asdict(held)))
    if facts.kernel is None:
        return costs if share is None else replace(costs, fragmentation_share=share)
    return on_device(costs, share, buffers=buffers, held=shape)


# ---- before there is a model -----------------------------------------------------------------------------------------


def share_that_trains(facts: RunFacts) -> float:
    """Return the share of the parameters that train by `--epp-trained-parameters`, the same in all layers; 1 without it."""
    if (trained := facts.flags.get("epp_trained_parameters")) is None:
        return 1.0
    share: float = trained / parameters.parameters_of({**facts.flags, "vocab_size": facts.flags["padded_vocab_size"]})
    return min(1.0, share)


def profile_for_search(facts: RunFacts, file: CostsFile | None = None) -> Profile:
    """Return the costs by which layers are divided, before a last stage knows how it computes its loss: as flags ask for it."""
    shape = replace(model_shape(facts), loss_block_tokens=facts.loss_block_tokens)
    return _profile(facts, file, shape).training(share_that_trains(facts))


def costs_of_layout(facts: RunFacts, profile: Profile, layout: Layout) -> PipelineCosts:
    held, replicas = replace(facts.optimizer, trained_share=share_that_trains(facts)), facts.flags["data_parallel_size"]
    costs = profile.costs(layout.layers, optimizer=held, replicas=replicas, vocabulary_shares=layout.vocabulary_shares)
    return with_device_memory(facts, costs, profile.gradient_buffers(len(layout.layers)))


def sample_of(facts: RunFacts, profile: Profile, asked: LayoutQuestion) -> Sample:
    rank_of, caps = asked.first.placement.rank_of, (asked.cap_bytes,) * asked.first.placement.num_ranks
    both = (False, True)[: 1 + (share_that_trains(facts) == 1)]
    return Sample(
        problems=tuple(Problem(lengths, rank_of, caps, asked.token_multiple) for lengths in asked.batches),
        costs_of=partial(costs_of_layout, facts, profile),
        num_layers=facts.flags["num_layers"],
        options=asked.options,
        placements=asked.placements,
        vocabulary={"off": (False,), "on": (True,), "auto": both}[asked.vocabulary],
    )


def choose_layout(facts: RunFacts, file: CostsFile | None, asked: LayoutQuestion) -> LayoutAnswer:
    """Choose layout, split weight gradients and whole logits for typical batches. Raises `InfeasibleError` if nothing fits."""
    profile, first, layouts, logits = profile_for_search(facts, file), asked.first, list[Layout](), None
    sample = sample_of(facts, profile, asked)
    if asked.search != "auto":
        if asked.search == "balanced":
            batches, rank_of = map(Lengths, asked.batches), first.placement.rank_of
            shards = facts.flags["epp_vocab_parallel"] == "on"
            layers = balanced_layers(profile, sample.num_layers, len(rank_of), batches, rank_of, shards_vocabulary=shards)
            first = Layout(layers, first.placement)
        layouts = [replace(first, shards_vocabulary=shards) for shards in sample.vocabulary]
    if asked.longest:
        whole = replace(facts.changed(epp_loss_block_tokens=0), loss_block_tokens=0)
        logits = partial(costs_of_layout, whole, profile_for_search(whole)), asked.longest
    tensor_ranks = facts.flags["tensor_model_parallel_size"]
    return settle(sample, tensor_ranks=tensor_ranks, opens_weights=asked.opens_weights, layouts=layouts, logits=logits)[1]


def choose_latents_of(facts: RunFacts, file: CostsFile | None, asked: LayoutQuestion) -> LatentsChoice:
    """Choose what slices of latent attention hand on, by plans for the batches with the first layout."""

    def trial(choice: str) -> LatentsTrial:
        own = facts.changed(epp_latents=choice)
        sample = sample_of(own, profile_for_search(own, file), asked)
        return LatentsTrial(sample.problems, sample.costs_of(asked.first), sample.options)

    return choose_latents(trial)
