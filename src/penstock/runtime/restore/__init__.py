"""Saved states read into a pipeline: what of them, by whom, and what comes from other ranks."""
