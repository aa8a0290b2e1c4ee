"""Tests of megatron_epp, by what they need; see `docs/testing.md`."""
