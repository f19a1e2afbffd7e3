"""The commands that study schedules, and need no training."""
