"""Predicts what ranks hold at each moment of a run, as the runtime accounts for it. Never imports torch."""
