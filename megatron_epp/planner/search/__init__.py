"""Searches for the fastest plan: greedy, local search, within a budget, and for replicas in lockstep."""
