"""The recorded training of a hybrid model without Transformer Engine, whose norm behind the last layer is part of no spec."""

from megatron_epp.mcore import entry
from tests.support.mcore import recorded_training


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from tests.support.mcore.local_hybrid import use_torch_norms

        use_torch_norms()
        recorded_training.main()


if __name__ == "__main__":
    main()
