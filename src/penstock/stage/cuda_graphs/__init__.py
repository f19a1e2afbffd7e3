"""Passes of a stage recorded as CUDA graphs, and replayed."""
