"""A framework's script that calls one of Megatron's schedules by its name, imported before anything else, through a wrapper."""

import functools

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from megatron.training import training

CALLS = []


def choose(*_, **__):
    """Take the place of Megatron's choice among its schedules."""
    from megatron.core import mpu

    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return wrapped(forward_backward_no_pipelining)
    if mpu.get_virtual_pipeline_model_parallel_world_size() is None:
        return wrapped(forward_backward_pipelining_without_interleaving)
    return wrapped(forward_backward_pipelining_with_interleaving)


def wrapped(schedule):
    @functools.wraps(schedule)
    def call(*args, **kwargs):
        CALLS.append(schedule.__name__)
        return schedule(*args, **kwargs)

    return call


def main():
    from tests.support.mcore import recorded_training

    schedules.get_forward_backward_func = training.get_forward_backward_func = choose
    recorded_training.main()
    print(f"called through the wrapper: {len(CALLS)} times {CALLS[0]}")


if __name__ == "__main__":
    main()
