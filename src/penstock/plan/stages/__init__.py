"""What a stage of a plan costs, and which sets of layers may be one."""
