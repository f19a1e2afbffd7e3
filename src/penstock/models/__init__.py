"""Models that can be cut into blocks."""
