"""Messages between the ranks of a pipeline, and the process groups that carry them."""
