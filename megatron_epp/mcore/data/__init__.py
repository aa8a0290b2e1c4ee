"""Documents in Megatron's ``.bin``/``.idx`` files: written, checked, and read as sequences."""
