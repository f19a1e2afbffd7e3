"""Updates of the weights of a stage: the steps of its optimizer, and their rates."""
