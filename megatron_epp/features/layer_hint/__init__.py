"""A hint to other layers per stage, where even ones keep ranks waiting."""
