"""Checkpoints on disk: format, writer, manager."""
