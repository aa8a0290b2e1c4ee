"""Vocabulary shards: the output layer divided over the pipeline's ranks, which compute the loss of each chunk together.

By Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism (2024); see `plan.vocabulary_operations`.
"""
