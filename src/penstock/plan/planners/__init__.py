"""Planners: each searches a space of plans for the least cost."""
