"""A training iteration by a plan: on documents, on samples of a program, or on microbatches of its own."""
