"""`penstock compare`: several methods on one task, over several seeds."""
