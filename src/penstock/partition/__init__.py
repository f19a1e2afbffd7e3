"""How a model becomes stages: blocks, tied parameters, sequence slices, chosen delays."""
