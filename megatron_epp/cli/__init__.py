"""The command line, a file per command; `main` lists them, `inputs` and `lengths` read what several commands take."""
