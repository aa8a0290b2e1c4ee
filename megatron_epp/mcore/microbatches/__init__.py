"""Plans for a script's own microbatches, with its data, forward step, loss and model (`--epp-microbatches user`)."""
