"""Several stages on each rank: orders that the search tries for them."""
