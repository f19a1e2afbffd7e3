"""The vocabulary of schedules: actions, operations, orders, placements and version rules."""
