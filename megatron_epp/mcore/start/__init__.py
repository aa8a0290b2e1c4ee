"""Start of a run: its stages, links, costs and caps, and the iterators of its documents."""
