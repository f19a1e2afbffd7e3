"""Room 8: config, data, the training loop, saved weights, launch."""
