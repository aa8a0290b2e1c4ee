"""A training script whose model gathers its logits over tensor-parallel ranks."""

import functools

from megatron_epp.mcore import entry
from tests.support.mcore import recorded_training


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.core.models.gpt import GPTModel

        build = GPTModel.__init__

        @functools.wraps(build)
        def gathering(*args, **named):
            build(*args, **(named | {"parallel_output": False}))

        GPTModel.__init__ = gathering
        recorded_training.main()


if __name__ == "__main__":
    main()
