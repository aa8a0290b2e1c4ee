"""Tools of this repository; run them from its root."""
