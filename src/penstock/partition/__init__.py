"""Partition a model into stages: blocks, tied parameters, sequence slices, chosen delays."""
