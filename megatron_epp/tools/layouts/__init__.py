"""Search for the layout of a model that suits a sample of its batches."""
