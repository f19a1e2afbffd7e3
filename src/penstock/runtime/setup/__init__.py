"""What is checked and built before a run begins."""
