"""The error that is raised for flags."""

from megatron_epp.plan.errors import EppError


class ArgumentError(EppError):
    """Flags that cannot be combined. The message names them."""
