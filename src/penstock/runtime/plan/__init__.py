"""A pipeline before it is built: what the runtime can run, and the plan that passes every check."""
