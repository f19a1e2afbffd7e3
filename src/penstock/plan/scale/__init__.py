"""How fast a model can be trained at all: the analysis of layered gradient accumulation, from formulas alone."""
