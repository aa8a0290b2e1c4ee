"""A training script whose forward step fails on the last rank in the third iteration."""

import os

from megatron_epp.mcore import entry
from tests.support.mcore import recorded_training


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.training import get_args

        from megatron_epp.mcore.model import gpt

        stock = gpt.forward_step

        def forward_step(data_iterator, model):
            if get_args().curr_iteration == 2 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
                raise ValueError("this sample has no image")
            return stock(data_iterator, model)

        gpt.forward_step = forward_step
        recorded_training.main()


if __name__ == "__main__":
    main()
