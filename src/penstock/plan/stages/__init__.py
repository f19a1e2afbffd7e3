"""What planners have in common: devices, plans, cost functions of a graph, cuts, prefixes and knapsacks."""
