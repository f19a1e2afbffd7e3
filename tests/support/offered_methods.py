"""The methods that a pipeline runs. Those that split the state of stages by themselves are only simulated so far."""

from penstock.schedule.methods.table import METHODS

OFFERED = {name: row for name, row in METHODS.items() if not row.needs_sharded_state}
"""All of the table, once the runtime has sharded state: then the table takes its place."""
