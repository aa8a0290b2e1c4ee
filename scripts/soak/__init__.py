"""Memory of all processes of a long training on this machine's CPUs: how much it grows per iteration."""
