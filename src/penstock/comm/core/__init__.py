"""Building blocks of communication: tickets, background threads, message tags, the rank grid, the trace recorder."""
