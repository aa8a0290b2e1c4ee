"""FlexSP (arXiv 2412.01523): every sequence has a context-parallel degree of its own."""
