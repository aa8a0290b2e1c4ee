"""Errors for users: one or two lines with the numbers and the flag to change."""


class EppError(Exception):
    """Base of every error this package raises on purpose. The command line prints it without a traceback."""


class PlanError(EppError):
    """A plan, or its text or JSON form, is malformed."""


class InfeasibleError(EppError):
    """No plan fits the limits. The message names the smallest sufficient limit, or the flag to change.

    Attributes:
        least_cap_bytes: the smallest sufficient memory cap; 0 if another limit is the reason.
    """

    def __init__(self, message: str, least_cap_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_cap_bytes = least_cap_bytes
