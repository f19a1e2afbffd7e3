"""Schedules that are arrays: lowered, played and proven without an object for each action. Never imports torch."""
