"""What `penstock train` prepares before its processes start."""
