"""Time and memory of every action: the cost model and the sources of its coefficients."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_epp.cost.model import Costs

__all__ = ["Costs"]


def __getattr__(name: str) -> Any:
    if name != "Costs":  # a training rank reads constants of this package, and no costs
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from megatron_epp.cost import model

    return model.Costs
