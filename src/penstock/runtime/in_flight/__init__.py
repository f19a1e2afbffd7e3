"""As many microbatches in flight as links ask for: measured in the first batches, agreed on, kept in snapshots."""
