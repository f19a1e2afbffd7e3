"""Hosts and links on one machine, and the processes of `benchmarks.links` that train over them."""
