"""What is raised for flags."""

from megatron_epp.plan.errors import EppError


class ArgumentError(EppError):
    """Flags that do not go together. The message names them."""
