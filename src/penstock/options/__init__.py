"""The options of a pipeline, each listed once, in groups."""
