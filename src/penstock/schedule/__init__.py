"""Room 1: what runs when, on which weights. Never imports torch."""
