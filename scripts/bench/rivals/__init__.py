"""Systems of 2026 for sequences of very different lengths, on paper and on equal terms."""
