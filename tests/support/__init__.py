"""What several tests share: cases, oracles, planted faults, processes."""
