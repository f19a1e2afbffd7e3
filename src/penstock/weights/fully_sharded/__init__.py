"""Version stores of a stage whose weights are rows while a span trains, whole between a GATHER and its RELEASE."""
