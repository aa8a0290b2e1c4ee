"""Exact plans of small chunk tables by integer programming, and refinement of plans in the background."""
