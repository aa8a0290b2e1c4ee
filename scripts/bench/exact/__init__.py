"""Least idle times of pipelines of equal microbatches, by the exact planner."""
