"""The engine that runs a schedule on ranks."""
