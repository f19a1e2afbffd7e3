"""Plans whose stages form a graph: branches of a model run side by side."""
