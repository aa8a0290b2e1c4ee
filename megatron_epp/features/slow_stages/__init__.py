"""Comparison of iterations with their plans: a stage that stays slower than its costs is named in the log."""
