"""The configuration of `penstock train`: schema, loading, key reference."""
