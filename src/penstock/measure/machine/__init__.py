"""What the machine at hand does: its devices, its memory, and the links between its processes."""
