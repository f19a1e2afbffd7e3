"""The job that a process is part of: its place in it, as launchers announce it, and the store where its ranks meet."""
