"""A framework's script that calls one of Megatron's schedules by its name, imported before anything else, through a wrapper."""

import functools

from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining as no_pipelining
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving as interleaved
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving as not_interleaved
from megatron.training import training

CALLS = []


def choose(*_, **__):
    from megatron.core import mpu

    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return wrapped(no_pipelining)
    if mpu.get_virtual_pipeline_model_parallel_world_size() is None:
        return wrapped(not_interleaved)
    return wrapped(interleaved)


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
