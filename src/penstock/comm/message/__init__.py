"""A message between two stages, and its form as bytes."""
