"""Construction of the training command from YAML files and overrides. Imports neither torch nor Megatron."""
