"""Starting of trainings: torchrun's command, its log in short, runs that other commands start."""
