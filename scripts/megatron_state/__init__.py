"""State that Megatron's functions keep outside of themselves: found in its sources, and what plans do about it."""
