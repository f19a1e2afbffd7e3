"""What the schedules of all methods cost."""
