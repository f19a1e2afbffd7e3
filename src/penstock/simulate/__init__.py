"""Room 3: a schedule and costs give a predicted timeline. Never imports torch."""
