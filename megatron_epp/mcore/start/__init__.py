"""What comes ahead of the first iteration: stages, links, costs and caps of a run, and the iterators of its documents."""
