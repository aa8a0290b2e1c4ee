"""Serves jobs as `megatron_epp.launch.forked` does, without Megatron, for jobs that do not train."""

from megatron_epp.launch import forked


def serve(handle: int) -> None:
    """As `forked.serve`, but nothing is imported before the first job."""
    forked._PRELOAD = ("gc", "collect")
    forked.serve(handle)
