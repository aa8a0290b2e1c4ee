"""The `--epp-*` flags, and checks of Megatron's flags that are given together with them."""

from megatron_epp.plan.errors import EppError


class ArgumentError(EppError):
    """Flags that cannot be combined. The message names them."""
