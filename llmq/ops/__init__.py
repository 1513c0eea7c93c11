"""Backends behind one seam: modules of the same functions by name (`seam` says what a signature means)."""
