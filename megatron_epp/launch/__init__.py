"""From YAML files and overrides to the command that trains. Imports neither torch nor Megatron."""
