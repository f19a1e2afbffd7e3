"""The engine behind `Pipeline`: it runs a pipeline span by span."""
