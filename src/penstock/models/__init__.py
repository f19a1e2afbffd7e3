"""Example models as lists of blocks."""
