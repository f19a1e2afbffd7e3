"""What `benchmarks.predictions` runs: configurations, profiles that predict them, ranks that train them, and tables."""
