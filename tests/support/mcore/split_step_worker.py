"""Training steps of two calls whose gradients are reduced after both: the loop of `wrap_worker` on two replicas, on four ranks.

The hooks of the model's configuration are set so that no call reduces. Prints for every way of data parallelism the largest
relative difference of the reduced gradients from those of Megatron's own schedule; and that of a planned call that reduces by
itself, as the hooks of Megatron's training ask, where one of the replicas has no microbatches.
"""

import contextlib
import itertools
from functools import partial

import torch
import torch.distributed as dist

from tests.support.mcore import wrap_worker
from tests.support.mcore.figures import record_figures

CALLS, COUNT = 2, len(wrap_worker.LENGTHS)


def main():
    wrap_worker.begin(2, replicas=2)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_epp

    replica = parallel_state.get_data_parallel_rank()
    wrap_worker.batches = partial(wrap_worker.batches, seed=5 + replica)
    for overlap, distributed in itertools.product((False, True), repeat=2):
        settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap, use_distributed_optimizer=distributed)
        (bare,) = wrap_worker.build(2, virtual=False)
        model = DistributedDataParallel(bare.config, settings, bare)
        of_each = []
        for schedule in (get_forward_backward_func(), megatron_epp.wrap()):
            for _ in range(2):  # of the first batch, Megatron's hooks only count
                of_each.append(step(model, schedule, finalize_model_grads, replica))
        stock, planned = of_each[1], of_each[3]
        figures = {"rank": dist.get_rank(), "overlap": overlap, "distributed": distributed}
        record_figures(figures | {"worst": apart(stock, planned)})
        alone, schedule = [], megatron_epp.wrap()
        for number in range(6):  # while costs are learnt and after
            count = 0 if replica == number % 2 else COUNT
            stock = step(model, get_forward_backward_func(), finalize_model_grads, replica, calls=1, count=count)
            model.zero_grad_buffer()
            model.config.no_sync_func = model.no_sync if overlap else None
            model.config.finalize_model_grads_func = finalize_model_grads
            results = call(model, schedule, count)
            assert len(results) == (count if bare.post_process else 0)
            alone.append(apart(stock, reduced(model, replica)))
        record_figures(figures | {"worst": max(alone)})


def apart(wanted, found):
    """Distance of gradients over their norm."""
    return float((found - wanted).norm() / wanted.norm())


def step(model, schedule, finalize, replica, calls=CALLS, count=COUNT):
    """Gradients that this rank's optimizer would use after a training step: all, or the shard that the rank owns."""
    model.zero_grad_buffer()
    config = model.config
    config.no_sync_func, config.grad_sync_func, config.finalize_model_grads_func = contextlib.nullcontext, None, None
    for _ in range(calls):
        with model.no_sync():
            call(model, schedule, count)
    if model.ddp_config.overlap_grad_reduce:
        model.start_grad_sync()
    finalize([model])
    return reduced(model, replica)


def call(model, schedule, count):
    """Results of a call of a schedule with so many microbatches."""
    return schedule(
        forward_step_func=wrap_worker.forward_step,
        data_iterator=wrap_worker.batches(),
        model=[model],
        num_microbatches=count,
        seq_length=1,
        micro_batch_size=1,
    )


def reduced(model, replica):
    """Reduced gradients of this rank."""
    sharded, found = model.ddp_config.use_distributed_optimizer, []
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            shards = bucket.grad_data.chunk(dist.get_world_size(buffer.data_parallel_group)) if sharded else [bucket.grad_data]
            found.append(shards[replica if sharded else 0].clone())
    return torch.cat(found)


if __name__ == "__main__":
    main()
