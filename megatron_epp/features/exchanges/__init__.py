"""Exchange buffers: those by which DeepEP and HybridEP exchange tokens of experts are as large as plans count them."""
