"""Elastic pipeline parallelism for Megatron-LM: plan each iteration from the lengths in its batch, prove it, run it."""

from typing import Any

__all__ = ["install", "wrap", "wrap_samples"]
__version__ = "0.3.0"
COMPILED_VARIABLE = "MEGATRON_EPP_COMPILED"
"""Environment variable; 0 runs the planner's inner loops in plain Python."""


def wrap(**settings: Any) -> Any:
    """Return a schedule function that runs a framework's own microbatches by plans; see `mcore.iteration.wrap.wrap`."""
    from megatron_epp.mcore.iteration.wrap import wrap as make

    return make(**settings)


def wrap_samples(**settings: Any) -> Any:
    """Return a function that trains a model of Megatron's on samples in slices; see `sample_schedule.wrap_samples`."""
    from megatron_epp.features.losses.sample_schedule import wrap_samples as make

    return make(**settings)


def install(**settings: Any) -> Any:
    """Have Megatron's pipeline schedules run by plans in any framework; see `mcore.iteration.wrap.install`."""
    from megatron_epp.mcore.iteration.wrap import install as put

    return put(**settings)
