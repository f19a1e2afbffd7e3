"""Preparation of `penstock train` before its processes start."""
