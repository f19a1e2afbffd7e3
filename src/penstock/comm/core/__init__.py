"""What all communication shares: tickets, background threads, the rank grid, the trace recorder."""
