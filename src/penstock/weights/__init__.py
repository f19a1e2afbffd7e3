"""Weight versions of a stage in torch: their buffers, leaves, epochs and updates."""
