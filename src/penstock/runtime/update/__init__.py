"""What happens once per batch: gradient sums, decisions, updates, averages."""
