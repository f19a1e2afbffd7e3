"""Optimizer steps on buffers, and predictions from optimizer state."""
