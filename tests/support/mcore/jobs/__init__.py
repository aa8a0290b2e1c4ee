"""Jobs that the worker runs (`worker`): each module has a function `run`, which the ranks of a job call."""
