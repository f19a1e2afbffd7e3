"""Worker processes: starting and watching them, and reporting how they ended."""
