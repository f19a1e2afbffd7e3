"""What each rank does when, and on which weights. Never imports torch."""
