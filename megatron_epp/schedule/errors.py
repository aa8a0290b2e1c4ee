"""Errors a person can act on: one or two lines with the numbers and the flag to change."""


class EppError(Exception):
    """Base of every error this package raises on purpose. The command line prints it without a traceback."""


class PlanError(EppError):
    """A plan, or its text or JSON form, is malformed."""


class InfeasibleError(EppError):
    """No plan fits the limits. The message names the smallest limit that would do, or the flag to change."""
