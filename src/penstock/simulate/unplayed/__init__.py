"""What is found of a span without playing its actions: messages, buffers, idle time."""
