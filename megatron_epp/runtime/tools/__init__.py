"""Profiling of a model's parts, and emulation of a plan with timed waits."""
