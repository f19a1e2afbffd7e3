"""Messages between stages: format, routing, and the transports."""
