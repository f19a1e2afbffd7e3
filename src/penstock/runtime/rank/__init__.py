"""The execution of one rank: its coroutine, its data, its reports, its snapshots."""
