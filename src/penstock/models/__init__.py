"""Room 7: what can be cut into blocks."""
