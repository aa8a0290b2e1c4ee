"""Pretrain a GPT with Megatron's own training loop: `torchrun ... -m megatron_epp.mcore.pretrain_gpt <flags>`.

Checkpoint writers start helper processes that import this module again, so it imports nothing slow by itself.
"""

from megatron_epp.mcore import entry


def main() -> None:
    """Train with the flags of this process's command line."""
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt

        gpt.pretrain()


if __name__ == "__main__":
    main()
