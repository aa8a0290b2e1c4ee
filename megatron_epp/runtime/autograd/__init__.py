"""Saved tensors of autograd: holding, counting, offloading and discarding them; deferred weight gradients."""
