"""The `--epp-*` flags, and what Megatron's flags allow beside them."""
