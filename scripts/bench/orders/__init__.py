"""Compares orders of other papers with the planner's own."""
