"""The planners of papers, one module each: the cost function (a `GraphCost`), and the search for the least cost.

`plan_as_X` searches as published; `plan_for_X_cost` finds the best plan for the same cost function where the published
search does not. `penstock.plan.planning` lists both by name.
"""
