"""Optimizers as stages take them: made, adapted, saved, and what is known of torch's own."""
