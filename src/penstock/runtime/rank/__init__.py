"""The state of one rank: its ledgers, its reports, its snapshots."""
