"""Planners of papers and their cost functions by name: those that need a graph, devices and microbatches, no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.plan.layer_configurations.pase import plan_as_pase
from penstock.plan.layer_configurations.pase_cost import PaseCost
from penstock.plan.memory_knobs.dawnpiper import plan_as_dawnpiper, plan_for_dawnpiper_cost
from penstock.plan.memory_knobs.dawnpiper_cost import DawnPiperCost
from penstock.plan.memory_knobs.mist import plan_as_mist
from penstock.plan.memory_knobs.mist_cost import MistCost
from penstock.plan.planners.dapple import plan_as_dapple, plan_for_dapple_cost
from penstock.plan.planners.piper import plan_as_piper, plan_for_piper_cost
from penstock.plan.profile.layer_graph import LayerGraph
from penstock.plan.schedule_choice.bapipe import plan_as_bapipe, plan_for_bapipe_cost
from penstock.plan.schedule_choice.bapipe_cost import BaPipeCost
from penstock.plan.stage_graphs.graphpipe import plan_as_graphpipe, plan_for_graphpipe_cost
from penstock.plan.stage_graphs.graphpipe_cost import GraphPipeCost
from penstock.plan.stages.dapple_cost import DappleCost
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.piper_cost import PiperCost
from penstock.plan.stages.planned import Search
from penstock.plan.stages.two_bw_cost import TwoBwCost

GraphPlanner = Callable[[LayerGraph, Devices, int], Search]
"""Plans a graph on devices, for so many microbatches per batch."""

AS_PUBLISHED: Mapping[str, GraphPlanner] = {
    "dapple": plan_as_dapple,
    "graphpipe": plan_as_graphpipe,
    "piper": plan_as_piper,
    "mist": plan_as_mist,
    "bapipe": plan_as_bapipe,
    "dawnpiper": plan_as_dawnpiper,
    "pase": plan_as_pase,
}
"""By the name of the planner."""

BEST_FOR_COST: Mapping[str, GraphPlanner] = {
    **AS_PUBLISHED,
    "dapple": plan_for_dapple_cost,
    "graphpipe": plan_for_graphpipe_cost,
    "piper": plan_for_piper_cost,
    "bapipe": plan_for_bapipe_cost,
    "dawnpiper": plan_for_dawnpiper_cost,
}
"""By the name of the cost function, for the planner "default"; some published ones are the best already."""

RATERS: Mapping[str, type[GraphCost]] = {
    cost.name: cost
    for cost in (
        DappleCost, GraphPipeCost, PiperCost, MistCost, BaPipeCost, DawnPiperCost, PaseCost, TwoBwCost
    )
}  # fmt: skip
"""By the name of the cost function."""
