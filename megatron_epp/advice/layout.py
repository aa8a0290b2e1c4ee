"""A layout: the parallel sizes of a run, the stages of a rank and the layers of a stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from megatron_epp.cost.balance import layout_flag
from megatron_epp.plan.placement import Placement


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Distribution of a model and a batch over devices.

    Attributes:
        tensor, context, pipeline, data: parallel sizes; their product is the number of devices.
        expert: ranks that share experts; they are among the context- and data-parallel ones.
        virtual: stages on each rank.
        placement: of the stages if a rank has several, a value of ``--epp-placement``.
        layers: of every stage, in the model's order.
    """

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int = 1
    virtual: int = 1
    placement: Literal["looped", "v"] = "looped"
    layers: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def sharing(self) -> tuple[int, int, int]:
        """Tensor-, context- and expert-parallel sizes, which determine the ranks that share a layer."""
        return self.tensor, self.context, self.expert

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return Placement(self.placement, self.pipeline, self.virtual).rank_of

    @property
    def lockstep_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of replicas that share experts; context-parallel ranks share them first."""
        size = max(1, self.expert // self.context)
        return tuple(tuple(range(first, first + size)) for first in range(0, self.data, size))

    @property
    def name(self) -> str:
        """Name such as ``TP 2 CP 1 PP 4 DP 8``, followed by sizes other than the default."""
        words = [f"TP {self.tensor} CP {self.context} PP {self.pipeline} DP {self.data}"]
        words += [f"EP {self.expert}"] * (self.expert > 1)
        words += [f"VPP {self.virtual} {self.placement}"] * (self.virtual > 1)
        words += [f"layers {self.layers_text}"] * (len(set(self.layers)) > 1)
        return " ".join(words)

    @property
    def layers_text(self) -> str:
        """Layers per stage in short form: ``4x8``, or ``9 2x8 7``."""
        runs = [(len(list(same)), count) for count, same in groupby(self.layers)]
        return " ".join(f"{times}x{count}" if times > 1 else str(count) for times, count in runs)

    @property
    def settings(self) -> dict[str, Any]:
        """Megatron's flags for the layout, with underscores."""
        flags: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.tensor > 1,
            "context_parallel_size": self.context,
            "pipeline_model_parallel_size": self.pipeline,
        }
        if self.expert > 1:
            flags["expert_model_parallel_size"] = self.expert
        if len(set(self.layers)) > 1:
            flags["pipeline_model_parallel_layout"] = layout_flag(self.layers)
        elif self.virtual > 1:
            flags["num_virtual_stages_per_pipeline_rank"] = self.virtual
        return flags | {"use_distributed_optimizer": True}
