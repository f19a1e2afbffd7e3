"""Corrections of staleness, one module for each."""
