"""A training script with a loss of its own, which plans must call: Megatron's, multiplied by -7."""

from functools import partial

from megatron_epp.mcore import entry
from tests.support.mcore import recorded_training


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt

        stock = gpt.forward_step

        def turned(loss_func, losses):
            loss, *rest = loss_func(losses)
            return (-7.0 * loss, *rest)

        def forward_step(data_iterator, model):
            output, loss_func = stock(data_iterator, model)
            return output, partial(turned, loss_func)

        gpt.forward_step = forward_step
        recorded_training.main()


if __name__ == "__main__":
    main()
