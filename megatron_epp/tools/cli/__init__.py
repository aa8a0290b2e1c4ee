"""The command line, a file per command; `main` lists them, `planning_flags` and `lengths` read what several commands take."""
