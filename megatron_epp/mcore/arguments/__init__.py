"""The `--epp-*` flags, and checks of Megatron's flags that are given together with them."""
