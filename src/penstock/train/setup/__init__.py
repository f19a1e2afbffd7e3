"""The parts of a run of `penstock train` that its configuration asks for."""
