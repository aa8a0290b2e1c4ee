"""The input of the advice: a model, a cluster and a batch. A configuration of parallel sizes and its costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import TRAINED_SHARE, OptimizerBytes
from megatron_epp.features import batch_target
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.layer_flags import whole_pattern
from megatron_epp.plan.layout import Layout, even_layers, layout_flag, staged_pattern
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem
from megatron_epp.tools.formulas import ModelShape, Profile, Rates
from megatron_epp.tools.formulas.analytic import MICROSECONDS, analytic_profile, profile_for
from megatron_epp.tools.formulas.library import Cluster, shape_of, token_multiple_of
from megatron_epp.tools.layouts.layout_choice import Sample

type Sharing = tuple[int, int, int, int]
"""Tensor-, context-, expert- and expert-tensor-parallel sizes, which determine the ranks that share a layer."""
COUNTED_FOR_EACH = "Tokens per second count what sequences have in common for each of them."
REDUCED_BYTES = 4  # bytes of a parameter's gradient in the reduction, which is in fp32


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    # tensor, context, pipeline, data: parallel sizes; their product is the number of devices
    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int = 1  # ranks that share experts; they are among the tensor-, context- and data-parallel ones
    expert_tensor: int = 1  # ranks that share an expert
    virtual: int = 1  # stages on each rank
    placement: Literal["looped", "v", "ring"] = "looped"  # of the stages if a rank has several, a value of ``--epp-placement``
    layers: tuple[int, ...] = ()  # of every stage, in the model's order
    shards_vocabulary: bool = False  # the output layer is divided over the pipeline ranks
    # What slices of latent attention hand on, a value of ``--epp-latents``; empty for what the model's flags say
    latents: str = ""

    @property
    def devices(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def ranks(self) -> int:
        return self.tensor * self.context

    @property
    def sharing(self) -> Sharing:
        return self.tensor, self.context, self.expert, self.expert_tensor

    @property
    def kinds(self) -> int:
        """Number of kinds of parallelism but for replicas; several stages on a rank, unequal layers and shards count, too."""
        sizes = (self.tensor, self.context, self.pipeline, self.expert, self.virtual, len(set(self.layers)))
        return sum(size > 1 for size in sizes) + self.shards_vocabulary

    @property
    def stages(self) -> Layout:
        return Layout(self.layers, Placement(self.placement, self.pipeline, self.virtual), self.shards_vocabulary)

    @property
    def rank_of(self) -> tuple[int, ...]:
        return Placement(self.placement, self.pipeline, self.virtual).rank_of

    def with_layout(self, layout: Layout) -> Configuration:
        placed = replace(self, layers=layout.layers, shards_vocabulary=layout.shards_vocabulary)
        kind, ranks, chunks = layout.placement.kind, layout.placement.num_ranks, layout.placement.num_chunks
        return replace(placed, pipeline=ranks, virtual=chunks, placement=kind)

    @property
    def lockstep_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of replicas that share experts; tensor- and context-parallel ranks share them first."""
        size = max(1, self.expert * self.expert_tensor // self.ranks)
        return tuple(tuple(range(first, first + size)) for first in range(0, self.data, size))

    @property
    def name(self) -> str:
        """Name such as ``TP 2 CP 1 PP 4 DP 8``, followed by sizes other than the default."""
        words = [f"TP {self.tensor} CP {self.context} PP {self.pipeline} DP {self.data}"]
        words += [f"EP {self.expert}"] * (self.expert > 1)
        words += [f"ETP {self.expert_tensor}"] * (self.expert_tensor > 1)
        words += [f"VPP {self.virtual} {self.placement}"] * (self.virtual > 1)
        words += [f"layers {self.layers_text}"] * (len(set(self.layers)) > 1 or self.shards_vocabulary)
        words += [f"latents {self.latents}"] * bool(self.latents)
        return " ".join(words)

    @property
    def layers_text(self) -> str:
        """Layers of the stages in order as a sum: ``4x8`` for four stages of eight, or ``9+2x8+7``."""
        runs = [(len(list(same)), count) for count, same in groupby(self.layers)]
        text = "+".join(f"{times}x{count}" if times > 1 else f"{count}" for times, count in runs)
        return text + " (vocabulary over all)" * self.shards_vocabulary

    def settings(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Megatron's flags for the configuration of a model, which has flags of its own, with underscores."""
        flags: dict[str, Any] = {"tensor_model_parallel_size": self.tensor, "sequence_parallel": self.tensor > 1}
        flags |= {"context_parallel_size": self.context, "pipeline_model_parallel_size": self.pipeline}
        if self.expert > 1:
            flags["expert_model_parallel_size"] = self.expert
        if model.get("num_experts") and self.expert_tensor != self.tensor:
            flags["expert_tensor_parallel_size"] = self.expert_tensor
        if pattern := whole_pattern(model):  # says which stage has which layers
            flags["hybrid_layer_pattern"] = staged_pattern(pattern, self.layers)
        elif len(set(self.layers)) > 1:
            flags["pipeline_model_parallel_layout"] = layout_flag(self.layers, model.get("mtp_num_layers") or 0)
        elif self.virtual > 1:
            flags["num_virtual_stages_per_pipeline_rank"] = self.virtual
        return flags | {"use_distributed_optimizer": True}


@dataclass(frozen=True, slots=True)
class Question:
    flags: dict[str, Any]  # Megatron's flags of the model; parallel sizes among them are ignored
    cluster: Cluster  # kind of machine
    devices: int  # number of devices to use
    cap_bytes: int  # memory cap of one device
    lengths: tuple[int, ...]  # tokens of every sequence of a global batch
    context: int  # largest number of tokens of a sequence
    fixed: dict[str, int] = field(default_factory=dict)  # sizes that are not searched, by names of `Configuration`
    options: Options = field(default_factory=Options)  # of the planner
    # Profiles that replace formulas, by sizes that share a layer; if there are any, no other sizes are searched
    measured: dict[Sharing, Profile] = field(default_factory=dict)
    costs_files: dict[Sharing, str] = field(default_factory=dict)  # path of each of them
    borrowed: tuple[Borrowed, ...] = ()  # of every sequence, the first tokens that another one holds; empty if none share any
    documents: str = "split"  # treatment of documents longer than the context (`LONG_DOCUMENTS`), already applied to `lengths`
    # Whether the output layer may be divided over the pipeline ranks, see `layout_choice.Sample`
    vocabulary: tuple[bool, ...] = (False,)
    # Weight gradients are split where plans are faster with it, if the options do not split them anyway
    opens_weights: bool = False

    @property
    def may_split_weights(self) -> bool:
        """True unless Transformer Engine's layers have biases, with which a training computes weight gradients in backwards."""
        return self.opens_weights and bool(self.flags.get("disable_bias_linear")) and not self.flags.get("add_qkv_bias")

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def shared_tokens(self) -> int:
        return sum(count for _, count in self.borrowed)

    @property
    def tokens_text(self) -> str:
        return f"{self.tokens:,} tokens" + f" ({self.shared_tokens:,} of them in common with others)" * bool(self.borrowed)

    @property
    def trained_share(self) -> float:
        return float(self.flags.get(TRAINED_SHARE, 1.0))

    def shape(self, config: Configuration) -> ModelShape:
        """Return the model's shape with the configuration's sizes. Raises `EppError` if ranks cannot share the heads."""
        latents = {"epp_latents": config.latents} if config.latents else {}
        sizes = config.settings(self.flags) | self._expert_sizes(config)
        return shape_of(self.flags | sizes | latents | {"seq_length": self.context})

    def _expert_sizes(self, config: Configuration) -> dict[str, int]:
        """Sizes of expert parallelism as Megatron's flags; a model's own are replaced by those that are not said, too."""
        return {"expert_model_parallel_size": config.expert, "expert_tensor_parallel_size": config.expert_tensor}

    @property
    def rates(self) -> Rates:
        return self.cluster.linked(self.devices)

    def costs(self, config: Configuration) -> PipelineCosts:
        """Costs of every stage on devices, from the profile measured with the configuration's sizes, or by formula."""
        profile = profile_for(self.measured.get(config.sharing), self.shape(config), self.rates).training(self.trained_share)
        sizes = {"data_parallel_size": config.data} | self._expert_sizes(config)
        optimizer = OptimizerBytes.of_flags(self.flags | config.settings(self.flags) | sizes, profile.weight_bytes)
        return profile.costs_on_device(config.stages, optimizer, config.data)

    def token_multiple(self, config: Configuration) -> int:
        return token_multiple_of(self.flags | config.settings(self.flags))

    def problem(self, config: Configuration, lengths: tuple[int, ...]) -> Problem:
        caps = (self.cap_bytes,) * config.pipeline
        return Problem(lengths, config.rank_of, caps, token_multiple=self.token_multiple(config))

    def batch(self, config: Configuration) -> Problem:
        """Planning problem of the whole batch, with trees that the replicas can share."""
        problem = replace(self.problem(config, self.lengths), borrowed=self.borrowed)
        divisible = batch_target(problem, "divisible")
        return problem if divisible is None else divisible(problem, config.data)

    def problem_of(self, config: Configuration, share: Iterable[int]) -> Problem:
        """Planning problem of the replica that has the sequences at these positions of the batch."""
        return self.batch(config).part(share)

    def even_layers(self, config: Configuration) -> tuple[int, ...]:
        return even_layers(int(self.flags["num_layers"]), config.pipeline * config.virtual)

    def sample(self, config: Configuration, share: Iterable[int]) -> Sample:
        """Return the input of the search for a layout, with the other sizes of a configuration and a replica's share."""
        ranks, chunks = config.pipeline, self.fixed.get("virtual")
        kinds: list[Literal["looped", "v"]] = ["looped", "v"] if chunks == 2 else ["looped"]
        return Sample(
            problems=(self.problem_of(config, share),),
            costs_of=lambda layout: self.costs(config.with_layout(layout)),
            num_layers=int(self.flags["num_layers"]),
            options=self.options,
            placements=() if chunks is None else tuple(Placement(kind, ranks, chunks) for kind in kinds),
            vocabulary=self.vocabulary,
        )

    def reduction_us(self, config: Configuration) -> float:
        """Time to reduce gradients and gather weights, on the slowest rank, not overlapped; rings over nodes use every link."""
        shape, holders = self.shape(config), config.context * config.data
        rank_of, sharing = config.rank_of, config.expert * config.expert_tensor
        layer, slowest_us = analytic_profile(shape, self.rates).mean_layer, 0.0
        experts, others = layer.expert_parameters, layer.parameters - layer.expert_parameters
        for rank in range(config.pipeline):
            count = sum(layers for on, layers in zip(rank_of, config.layers, strict=True) if on == rank)
            last = 1 / config.pipeline if config.shards_vocabulary else rank == rank_of[-1]
            dense = count * others + ((rank == rank_of[0]) + last) * shape.vocabulary_parameters / config.tensor
            dense_us = self._ring_us(dense, holders, config.tensor)
            expert_us = self._ring_us(count * experts, max(1, holders * config.tensor // sharing), sharing)
            slowest_us = max(slowest_us, dense_us + expert_us)
        return slowest_us

    def _ring_us(self, parameters: float, group: int, spacing: int) -> float:
        """Time of `reduction_us` for a group of ranks with the given parameters each, `spacing` ranks apart in a node."""
        rates, in_node = self.cluster.rates, max(1, min(group, self.cluster.devices_per_node // spacing))
        rate = min(rates.exchange_bytes, in_node * rates.message_bytes) if group > in_node else rates.exchange_bytes
        value_bytes = 2 if self.flags.get("bf16") or self.flags.get("fp16") else 4
        return MICROSECONDS * (self.trained_share * parameters * (REDUCED_BYTES + value_bytes) * (1 - 1 / group)) / rate
