"""Backward passes in parts: split backward, recomputation, activation offload."""
