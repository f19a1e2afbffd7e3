"""The methods that one pipeline runs. Those that split the state of stages by themselves need parallel ones."""

from penstock.schedule.methods.table import METHODS

OFFERED = {name: row for name, row in METHODS.items() if not row.needs_sharded_state}
"""The others are in tests/runtime: test_fully_sharded.py, and test_shards_of_versions.py for 2bw-layered."""
