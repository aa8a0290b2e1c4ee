"""What is asked: a model, a cluster, a batch; and what a layout costs there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron_epp.advice.layout import Layout
from megatron_epp.cost import ModelShape, PipelineCosts, Profile, Rates, analytic_profile, on_device
from megatron_epp.cost.analytic import MICROSECONDS
from megatron_epp.cost.library import Cluster, balanced_layers, even_layers, shape_of
from megatron_epp.planner import Options, Problem

type Sharing = tuple[int, int, int]
"""Tensor-, context- and expert-parallel sizes: which ranks share a layer."""
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
        measured: profiles that take the place of formulas, by which ranks share a layer; where there are any, nothing else is
            searched.
        costs_files: where each of them is.
        documents: what becomes of documents longer than the context (`LONG_DOCUMENTS`); `lengths` are of what they have become.
    """

    flags: dict[str, Any]
    cluster: Cluster
    devices: int
    cap_bytes: int
    lengths: tuple[int, ...]
    context: int
    fixed: dict[str, int] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    measured: dict[Sharing, Profile] = field(default_factory=dict)
    costs_files: dict[Sharing, str] = field(default_factory=dict)
    documents: str = "split"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def bytes_per_value(self) -> int:
        return 2 if self.flags.get("bf16") or self.flags.get("fp16") else 4

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
        """As it was measured with the layout's sizes, else by formula."""
        return self.measured.get(layout.sharing) or analytic_profile(self.shape(layout), self.rates(layout))

    def costs(self, layout: Layout) -> PipelineCosts:
        """Of every stage of the layout, with what a device holds beside what autograd keeps.

        The optimizer's state is shared by all ranks that hold the same weights; experts' are held by fewer.
        """
        profile, shape = self.profile(layout), self.shape(layout)
        holders, share = layout.context * layout.data, shape.expert_parameters_on_rank / shape.layer_parameters_on_rank
        state_bytes = (1 - share) * profile.adam_bytes(holders) + share * profile.adam_bytes(holders // layout.expert)
        costs = profile.costs(layout.layers, state_bytes_per_parameter=state_bytes, replicas=layout.data)
        return on_device(costs, buffers=profile.gradient_buffers(layout.num_stages))

    def problem(self, layout: Layout, lengths: tuple[int, ...]) -> Problem:
        """One iteration of one replica."""
        caps = (self.cap_bytes,) * layout.pipeline
        return Problem(lengths, layout.rank_of, caps, token_multiple=layout.tensor * layout.context)

    def layers(self, layout: Layout, partition: str) -> tuple[int, ...]:
        """Of every stage, ``even`` or ``balanced``. Raises `EppError` where there are more stages than layers."""
        num_layers = int(self.flags["num_layers"])
        if partition == "even":
            return even_layers(num_layers, layout.num_stages)
        return balanced_layers(self.profile(layout), num_layers, layout.num_stages, self.lengths)

    def reduction_us(self, layout: Layout) -> float:
        """Time to reduce gradients and to gather weights over the ranks that hold the same, as a distributed optimizer does.

        The slowest rank's, with nothing of it hidden behind compute. A ring over nodes uses every member's link.
        """
        shape, holders = self.shape(layout), layout.context * layout.data
        layers = [0] * layout.pipeline
        for rank, count in zip(layout.rank_of, layout.layers, strict=True):
            layers[rank] += count
        experts, slowest_us = shape.expert_parameters_on_rank, 0.0
        for rank, count in enumerate(layers):
            ends = (rank == layout.rank_of[0]) + (rank == layout.rank_of[-1])
            dense = count * (shape.layer_parameters_on_rank - experts) + ends * shape.vocabulary_parameters / layout.tensor
            dense_us = self._ring_us(dense, holders, layout.tensor)
            expert_us = self._ring_us(count * experts, holders // layout.expert, layout.tensor * layout.expert)
            slowest_us = max(slowest_us, dense_us + expert_us)
        return slowest_us

    def _ring_us(self, parameters: float, group: int, apart: int) -> float:
        """For a group of ranks with so many parameters each, that are `apart` from each other in a node."""
        rates, node = self.cluster.rates, self.cluster.devices_per_node
        in_node = max(1, min(group, node // apart))
        rate = rates.exchange_bytes
        if group > in_node:
            rate = min(rate, in_node * rates.message_bytes)
        moved_bytes = parameters * (REDUCED_BYTES + self.bytes_per_value) * (1 - 1 / group)
        return MICROSECONDS * moved_bytes / rate
