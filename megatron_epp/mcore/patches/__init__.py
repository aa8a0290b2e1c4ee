"""Replacements for functions of Megatron, which are recognised by fingerprint."""
