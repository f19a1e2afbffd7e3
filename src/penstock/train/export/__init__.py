"""The weights that a run leaves: format, saving, sampling."""
