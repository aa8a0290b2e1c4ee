"""Which files' tests are in the set `fast`, and which files take longest."""

FAST: dict[str, tuple[str, ...]] = {}
"""Files, relative to `tests`, and of each the tests that are left to the default set because they take too long."""

LONG: tuple[str, ...] = ()
"""A file is one process's: the longest begin first, or one would leave the other idle at the end."""
