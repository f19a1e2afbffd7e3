"""A schedule and costs give a predicted timeline. Never imports torch."""
