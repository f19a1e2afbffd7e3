"""`penstock compare`: trains one task with several methods and seeds, and compares the results."""
