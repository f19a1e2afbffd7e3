"""The planner that simulates the schedules of methods."""
