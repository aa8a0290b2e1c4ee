"""Launchers, training scripts and stand-ins that tests with Megatron share."""
