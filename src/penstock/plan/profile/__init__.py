"""Profiles: what the layers of a model cost, as files and as graphs."""
