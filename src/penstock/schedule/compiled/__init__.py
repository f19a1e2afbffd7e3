"""A span of a schedule as arrays, and its times for many costs at once. Never imports torch."""
