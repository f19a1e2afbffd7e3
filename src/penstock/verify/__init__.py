"""`penstock verify`: a pipeline against an independent sequential reference."""
