"""`penstock verify`: compares a pipeline with an independent sequential reference."""
