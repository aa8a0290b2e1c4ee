"""Facts of a launch that trainings and tools read: settings in YAML, flags of a script, folders of runs."""
