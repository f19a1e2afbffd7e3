"""The training loop of `penstock train`."""
