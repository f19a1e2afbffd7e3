"""Schedules: what each rank runs, in which order, and on which weights. Never imports torch."""
