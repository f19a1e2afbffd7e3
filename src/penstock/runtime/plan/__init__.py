"""A pipeline before it is built: its options, what the runtime can run, and the plan that passes every check."""
