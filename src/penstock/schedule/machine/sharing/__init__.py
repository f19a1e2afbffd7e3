"""The machine whose ranks share cores and links: played in the order of time."""
