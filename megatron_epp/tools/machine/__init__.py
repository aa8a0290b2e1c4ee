"""Measurements and checks of a machine, with torch: what `first-run` and profiles run on devices."""
