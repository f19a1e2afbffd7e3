"""Configurations of the planner that simulates, one at a time."""
