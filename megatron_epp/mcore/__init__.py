"""The part of the package that imports Megatron."""
