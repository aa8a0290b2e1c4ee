"""Schedules and planners of papers, a file each; `table` lists them."""
