"""A loop of a framework's own in which the last rank becomes slow after costs were learnt: arguments as of `wrap_worker`."""

import time

import torch.distributed as dist

from tests.support.mcore import wrap_worker

SLEEP_S = 0.05


def main():
    from megatron_epp.mcore import entry

    entry.prepare()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    import megatron_epp
    from megatron_epp.cost.learning import RECORDED, WARM_UP
    from megatron_epp.cost.slowness import ITERATIONS

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    models = wrap_worker.build(dist.get_world_size(), False)
    schedule, quick = megatron_epp.wrap(), wrap_worker.forward_step

    def slow(data_iterator, model):
        time.sleep(SLEEP_S)
        return quick(data_iterator, model)

    for iteration in range(WARM_UP + RECORDED + 3 * ITERATIONS):
        if iteration == WARM_UP + RECORDED and dist.get_rank() == dist.get_world_size() - 1:
            wrap_worker.forward_step = slow
        wrap_worker.run(schedule, models)


if __name__ == "__main__":
    main()
