"""Everything that imports Megatron."""
