"""Weight versions on torch: buffers, leaves, epochs, updates."""
