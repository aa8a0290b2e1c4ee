"""Vocabulary shards: the output layer divided over the pipeline's ranks, which compute the loss of each chunk together.

The idea is of Yeung et al. (Balancing Pipeline Parallelism with Vocabulary Parallelism, 2024). Its operations S, N and T are
rows of `plan.vocabulary_operations`, and `planner.orders.vocabulary_order` inserts them.
"""
