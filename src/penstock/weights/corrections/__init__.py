"""Corrections for stale weights, one module each."""
