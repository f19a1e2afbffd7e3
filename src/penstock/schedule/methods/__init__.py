"""The tables of methods, corrections and ways to combine parallel pipelines."""
