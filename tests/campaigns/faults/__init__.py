"""Faults that are planted in runs of `penstock train`, and what must become of the runs: `make faults`."""
