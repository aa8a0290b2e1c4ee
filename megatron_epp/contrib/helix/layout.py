"""Layout of stages that are cut inside every layer's attention, which runs separately (`attention_operations`)."""

from __future__ import annotations

from typing import Any

from megatron_epp.contrib.helix.costs import with_separate_attention
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement


class HelixPlacement(Placement):
    """Looped placement with one stage more, on the first rank."""

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks + 1


class HelixLayout(Layout):
    """Blocks from one layer's attention to the next: a half layer at either end, and whole layers between."""

    @staticmethod
    def of(num_layers: int, num_ranks: int) -> HelixLayout:
        """Return the layout of a model.

        Raises:
            EppError: the ranks do not have equally many layers.
        """
        count, more = divmod(num_layers, num_ranks)
        if more or not count:
            raise EppError(f"separate attention needs equally many layers on every rank; {num_ranks} ranks share {num_layers}")
        return HelixLayout((1, *(2,) * (num_layers - 1), 1), HelixPlacement("looped", num_ranks, count))

    @property
    def is_movable(self) -> bool:
        return False

    def costs_of(self, costs: Any) -> Any:
        return with_separate_attention(costs)
