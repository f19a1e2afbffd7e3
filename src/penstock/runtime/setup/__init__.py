"""What is built before a run begins."""
