"""A whole model in place of blocks: its forward is followed, and divided into blocks."""
