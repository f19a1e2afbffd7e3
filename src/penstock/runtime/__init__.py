"""The runtime: `Pipeline`, its options and plans, and the engine that runs its ranks."""
