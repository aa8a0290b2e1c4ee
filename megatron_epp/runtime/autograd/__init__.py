"""What autograd saves: held, counted, moved, discarded, and weight gradients deferred."""
