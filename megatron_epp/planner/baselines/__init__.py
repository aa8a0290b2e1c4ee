"""Planners of everyday use to compare with: 1F1B of whole sequences, padded or packed, and Seq1F1B."""
