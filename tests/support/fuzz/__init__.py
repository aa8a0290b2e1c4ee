"""Random damage to every kind of file that the package reads: each damaged file is taken, or refused in a line that names it."""
