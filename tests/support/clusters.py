"""Cluster files of tests."""

TWO_SERVERS = """format: penstock cluster 1
name: two
node: 2
nodes: 2
flops: {value: 1e12, source: assumed}
memory: {value: 1e9, source: assumed}
inside: {value: 2e9, source: assumed}
between: {value: 2e8, source: assumed}
"""
"""Of two devices each."""
