"""A run that can start: checked, its schedules proven, its pipeline built."""
