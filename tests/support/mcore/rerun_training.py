"""A training script whose loss Megatron's rerun machine finds odd in iterations 2, 3 and 5, which therefore run twice.

In each it is the loss of the microbatch that runs first. Plans that follow learnt costs run microbatches from the last to the
first.
"""

from functools import partial

from megatron_epp.mcore import entry
from tests.support.mcore import recorded_training
from tests.support.mcore.trainings import reversed_orders

ODD_ITERATIONS = (2, 3, 5)


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
        from megatron.training import get_args

        from megatron_epp.mcore.model import gpt

        stock = gpt.forward_step

        def is_odd(loss):
            machine = get_rerun_state_machine()
            return get_args().curr_iteration + 1 in ODD_ITERATIONS and machine.state is RerunState.INITIAL_RUN

        def validated(loss_func, losses):
            found = loss_func(losses)
            get_rerun_state_machine().validate_result(
                result=found[0].detach().clone(), rejection_func=is_odd, message="an odd loss", tolerance=0.0, fatal=False
            )
            return found

        def forward_step(data_iterator, model):
            output, loss_func = stock(data_iterator, model)
            return output, partial(validated, loss_func)

        gpt.forward_step = forward_step
        with reversed_orders():
            recorded_training.main()


if __name__ == "__main__":
    main()
