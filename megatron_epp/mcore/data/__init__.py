"""Writing, checking and reading of documents in Megatron's ``.bin``/``.idx`` files."""
