"""Warm-up of attention: plans that libraries build for a class of shapes are built between iterations, on all ranks at once."""
