"""Tests of megatron_epp, by what they need; see `tests/README.md`."""
