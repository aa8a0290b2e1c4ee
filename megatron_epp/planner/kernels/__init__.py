"""The inner loops of planning: timing an order, fitting recompute to a cap, steps of the local search.

Plain functions over flat columns, compiled where numba is installed, and slower, with equal results, where it is not.
"""
