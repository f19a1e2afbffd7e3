"""Whole models: each stage runs the model's own forward, and computes what is its own of it."""
