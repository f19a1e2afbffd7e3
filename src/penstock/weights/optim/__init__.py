"""Optimizer updates on buffers, and what predictions read from optimizers."""
