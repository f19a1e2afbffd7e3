"""Functions that add actions to a schedule: updates, predictions, collectives, recomputation."""
