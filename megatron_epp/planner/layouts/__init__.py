"""Search for the layout of a model, for batches like those of a sample."""
