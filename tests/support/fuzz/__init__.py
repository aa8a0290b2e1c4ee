"""Random damage to every kind of file that the package reads: each is taken, or refused in a line that names it."""
