"""The trained weights of a run: file format, saving, sampling text."""
