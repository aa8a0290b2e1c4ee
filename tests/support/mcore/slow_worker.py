"""A loop of a framework's own in which the last rank becomes slow after costs were learnt: arguments as of `wrap_worker`."""

import time

import torch.distributed as dist

from tests.support.mcore import wrap_worker

SLEEP_S = 0.05


def main():
    models = wrap_worker.begin()
    import megatron_epp
    from megatron_epp.cost.learning import RECORDED, WARM_UP
    from megatron_epp.cost.slowness import ITERATIONS

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
