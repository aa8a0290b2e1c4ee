"""Removal of kinds of action that a test has added."""

from megatron_epp.plan import Op, operations


def unregister(op: Op, *with_it: Op) -> None:
    """Remove an added kind of action with the collectives and messages that it has added."""
    for name in (op, *with_it):
        del operations._TABLE[name]
