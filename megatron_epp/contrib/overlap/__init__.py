"""Steps of two actions, each of which computes while the other exchanges activations between tensor-parallel ranks."""
