"""Plans for devices that any links join, each pair at a speed of its own, as SPP makes them."""
