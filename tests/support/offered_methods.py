"""The methods that one pipeline of any model runs.

Those that split the state of stages by themselves need parallel ones; one that divides the output layer needs a model
made for it.
"""

from penstock.schedule.methods.table import METHODS

OFFERED = {name: row for name, row in METHODS.items() if not row.needs_sharded_state and not row.divides_head}
"""The others are in tests/runtime: test_fully_sharded.py, and test_shards_of_versions.py for 2bw-layered; and in
tests/models/test_vocabulary_parallel_gpt.py."""
