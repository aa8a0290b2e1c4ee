"""Public measurements next to plans of the same training."""
