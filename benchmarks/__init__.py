"""Benchmarks; every claim about speed or memory in the docs names one of these, its machine and its raw data."""
