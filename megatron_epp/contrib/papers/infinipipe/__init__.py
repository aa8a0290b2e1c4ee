"""InfiniPipe as its paper describes it: chunks, checkpointing and the search over the number of slices."""
