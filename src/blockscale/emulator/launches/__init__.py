"""A launch: its arguments, its program, its clusters and whose turn it is."""
