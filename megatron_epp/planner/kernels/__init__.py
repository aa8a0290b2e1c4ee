"""The inner loops of planning: timing an order, fitting recompute to a cap, steps of the local search.

Plain functions over flat columns. Where numba is installed they are compiled; where it is not, the same functions run as they
stand, slower, with the same results. Everything outside this folder deals in `Tables` and `Order`.
"""
