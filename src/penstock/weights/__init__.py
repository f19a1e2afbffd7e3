"""Room 5: weight versions on torch: buffers, leaves, epochs, updates."""
