"""Jobs that the worker runs (`worker`): the ranks of a job call a function of a module, `run` where none is named."""
