"""Times what a rank does between iterations."""
