"""Worker processes: starting them, watching them, reporting how they ended."""
