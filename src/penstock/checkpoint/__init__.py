"""Checkpoints on disk: their format, the writer, and the manager."""
