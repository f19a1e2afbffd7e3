"""Checks of a stage: what blocks must not do, what users have changed on them, and what other processes train."""
