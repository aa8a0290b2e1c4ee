"""What is asked: a model, a cluster, a batch; and what a layout costs there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron_epp.advice.layout import Layout
from megatron_epp.cost import ModelShape, PipelineCosts, Profile, Rates, analytic_profile
from megatron_epp.cost.analytic import MICROSECONDS
from megatron_epp.cost.library import Cluster, balanced_layers, even_layers, shape_of
from megatron_epp.planner import Options, Problem

REDUCED_BYTES = 4
"""Of a parameter's gradient, which is reduced in fp32."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to advise on.

    Attributes:
        flags: Megatron's, of the model; parallel sizes in it do not matter.
        cluster: of machines.
        devices: to use.
        cap_bytes: what one device may hold.
        lengths: tokens of every sequence of a global batch.
        context: tokens of the longest sequence there may be.
        fixed: sizes that are not to be searched, by names of `Layout`.
        options: of the planner.
    """

    flags: dict[str, Any]
    cluster: Cluster
    devices: int
    cap_bytes: int
    lengths: tuple[int, ...]
    context: int
    fixed: dict[str, int] = field(default_factory=dict)
    options: Options = field(default_factory=Options)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def shape(self, layout: Layout) -> ModelShape:
        """Raises `EppError`: the heads cannot be shared so."""
        return shape_of(
            self.flags | layout.settings | {"seq_length": self.context, "expert_model_parallel_size": layout.expert}
        )

    def rates(self, layout: Layout) -> Rates:
        """Of the cluster, with the links that the layout's ranks have.

        Tensor-parallel ranks are neighbours, then context-parallel ones, then replicas, then stages, as Megatron numbers them.
        Stages are taken to be on nodes of their own, unless there is one node only.
        """
        rates, node = self.cluster.rates, self.cluster.devices_per_node
        if self.devices <= node:
            return replace(rates, message_bytes=max(rates.message_bytes, min(rates.exchange_bytes, 1e15)))
        sharing, shape = layout.tensor * max(layout.context, layout.expert), self.shape(layout)
        if sharing <= node or not shape.exchanged_bytes_per_token:
            return rates
        inside = shape.tensor_exchanged_bytes_per_token / shape.exchanged_bytes_per_token
        abroad = (1 - inside) * (1 - node / sharing)
        return replace(rates, exchange_bytes=1 / ((1 - abroad) / rates.exchange_bytes + abroad / rates.message_bytes))

    def profile(self, layout: Layout) -> Profile:
        return analytic_profile(self.shape(layout), self.rates(layout))

    def costs(self, layout: Layout) -> PipelineCosts:
        """Of every stage of the layout."""
        return _costs(self.profile(layout), self.shape(layout), layout)

    def problem(self, layout: Layout, lengths: tuple[int, ...]) -> Problem:
        """One iteration of one replica."""
        caps = (self.cap_bytes,) * layout.pipeline
        return Problem(lengths, layout.rank_of, caps, token_multiple=layout.tensor * layout.context)

    def layers(self, layout: Layout, partition: str) -> tuple[int, ...]:
        """Of every stage, ``even`` or ``balanced``. Raises `EppError` where there are more stages than layers."""
        num_layers = int(self.flags["num_layers"])
        if partition == "even":
            return even_layers(num_layers, layout.num_stages)
        return balanced_layers(self.profile(layout), num_layers, layout.num_stages)

    def reduction_us(self, layout: Layout) -> float:
        """Time to reduce gradients and to gather weights over the ranks that hold the same, as a distributed optimizer does.

        The slowest rank's, with nothing of it hidden behind compute. A ring over nodes uses every member's link.
        """
        shape, rates, node = self.shape(layout), self.cluster.rates, self.cluster.devices_per_node
        holders = layout.context * layout.data
        experts = shape.expert_parameters_on_rank
        layers = [0] * layout.pipeline
        for rank, count in zip(layout.rank_of, layout.layers, strict=True):
            layers[rank] += count
        slowest_us = 0.0
        for rank, count in enumerate(layers):
            ends = (rank == layout.rank_of[0]) + (rank == layout.rank_of[-1])
            dense = count * (shape.layer_parameters_on_rank - experts) + ends * shape.vocabulary_parameters / layout.tensor
            moved_s = 0.0
            for parameters, group in ((dense, holders), (count * experts, holders // layout.expert)):
                members = max(1, min(group, node // (layout.tensor * (1 if group == holders else layout.expert))))
                fits = group <= members
                rate = rates.exchange_bytes if fits else min(rates.exchange_bytes, members * rates.message_bytes)
                moved_s += parameters * (REDUCED_BYTES + shape.bytes_per_value) * (1 - 1 / group) / rate
            slowest_us = max(slowest_us, MICROSECONDS * moved_s)
        return slowest_us


def _costs(profile: Profile, shape: ModelShape, layout: Layout) -> PipelineCosts:
    """With the optimizer's state shared by all ranks that hold the same weights, experts' by fewer."""
    holders = layout.context * layout.data
    fixed = shape.bytes_per_value + REDUCED_BYTES
    sharded = 12 if shape.bytes_per_value < 4 else 8
    share = shape.expert_parameters_on_rank / shape.layer_parameters_on_rank
    state = fixed + sharded * ((1 - share) / holders + share / (holders // layout.expert))
    return profile.costs(layout.layers, state_bytes_per_parameter=state)
