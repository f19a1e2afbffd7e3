"""What blocks and links cost on the machine at hand, measured through the runtime's own stages and lanes."""
