"""The proof that a schedule is complete, free of deadlock and consistent in its weight versions."""
