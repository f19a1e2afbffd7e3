"""Ranks plans for a profile and devices; planners and cost functions are chosen by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.checks import check_whole, did_you_mean, in_words
from penstock.errors import CapabilityError, ConfigError
from penstock.plan.candidates.planned_methods import METHODS, SEARCHED
from penstock.plan.planners.bapipe import BaPipeCost, plan_as_bapipe, plan_for_bapipe_cost
from penstock.plan.planners.dapple import DappleCost, plan_as_dapple, plan_for_dapple_cost
from penstock.plan.planners.dawnpiper import DawnPiperCost, plan_as_dawnpiper, plan_for_dawnpiper_cost
from penstock.plan.planners.graphpipe import GraphPipeCost, plan_as_graphpipe, plan_for_graphpipe_cost
from penstock.plan.planners.mist import MistCost, plan_as_mist
from penstock.plan.planners.pase import PaseCost, plan_as_pase
from penstock.plan.planners.pipedream import Choices, PipeDreamCost, plan_as_pipedream, plan_for_pipedream_cost
from penstock.plan.planners.piper import PiperCost, plan_as_piper, plan_for_piper_cost
from penstock.plan.planners.spp import SppCost, links_between, plan_as_spp
from penstock.plan.planners.two_bw import Sized, TwoBwCost, plan_as_two_bw, plan_for_two_bw_cost
from penstock.plan.profile.layer_graph import LayerGraph, layer_graph, sizes_of
from penstock.plan.profile.schema import Profile
from penstock.plan.run_forecast import stages_decide
from penstock.plan.shared_links import with_shared_links
from penstock.plan.simulated.candidate_trial import NAME as SIMULATED
from penstock.plan.simulated.plan_search import simulated_plans
from penstock.plan.stages.device_hierarchy import Devices
from penstock.plan.stages.graph_cost import GraphCost
from penstock.plan.stages.layer_row import Floats
from penstock.plan.stages.planned import Excluded, Plan, PlannedStage, Rating, Search, Skipped

_PUBLISHED = ("pipedream", "dapple", "spp", "graphpipe", "piper", "mist", "bapipe", "dawnpiper", "pase", "2bw-paper")
PLANNERS = ("default", *_PUBLISHED)
COSTS = (*_PUBLISHED, SIMULATED)
MICROBATCHES = 32  # per batch, where neither the profile nor the caller says

GraphPlanner = Callable[[LayerGraph, Devices, int], Search]
"""Plans a graph on devices, for so many microbatches per batch."""

_AS_PUBLISHED: Mapping[str, GraphPlanner] = {
    "dapple": plan_as_dapple,
    "graphpipe": plan_as_graphpipe,
    "piper": plan_as_piper,
    "mist": plan_as_mist,
    "bapipe": plan_as_bapipe,
    "dawnpiper": plan_as_dawnpiper,
    "pase": plan_as_pase,
}
_BEST_FOR_COST: Mapping[str, GraphPlanner] = {  # for the planner "default"; some published ones are the best already
    **_AS_PUBLISHED,
    "dapple": plan_for_dapple_cost,
    "graphpipe": plan_for_graphpipe_cost,
    "piper": plan_for_piper_cost,
    "bapipe": plan_for_bapipe_cost,
    "dawnpiper": plan_for_dawnpiper_cost,
}
_RATERS: Mapping[str, type[GraphCost]] = {
    cost.name: cost
    for cost in (DappleCost, GraphPipeCost, PiperCost, MistCost, BaPipeCost, DawnPiperCost, PaseCost, TwoBwCost)
}


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        profile: of the model.
        devices: to plan for.
        planner: one of `PLANNERS`.
        cost: one of `COSTS`, which plans are searched for and ranked by; None: the planner's own, and for "default" and
            "2bw-paper" that of the program which the profile is from; for "default" `SIMULATED` where the profile says
            enough (`Profile.can_be_simulated`), as those that penstock measures or makes do; otherwise "2bw-paper".
        microbatches: per batch; None: the profile's, or `MICROBATCHES`.
        samples: per batch, instead of microbatches, for profiles with several microbatch sizes.
        choices: for PipeDream's cost function.
        links: bytes per second between all pairs of devices, for "spp"; None: as levels of devices say.
        methods: that the cost "simulated" tries; None for all that it knows.
    """

    profile: Profile
    devices: Devices
    planner: str = "default"
    cost: str | None = None
    microbatches: int | None = None
    samples: int | None = None
    choices: Choices = field(default_factory=Choices)
    methods: tuple[str, ...] | None = None
    links: Floats | None = None


@dataclass(frozen=True)
class Planning:
    """What was planned.

    Attributes:
        request: with the cost function that was decided on.
        sizes: the graph at each microbatch size.
        plans: the best one first, rated by the cost function; empty if none fits.
        skipped: classes of candidates that were not looked into.
        left_out: planners that gave no plan, and why.
        excluded: what memory kept from being the best plan, where that is known.
    """

    request: PlanRequest
    sizes: Mapping[int, Sized]
    plans: tuple[Plan, ...]
    skipped: tuple[Skipped, ...]
    left_out: Mapping[str, str]
    excluded: Excluded | None = None

    def ratings(self, plan: Plan) -> dict[str, Rating]:
        """Return what every cost function says of a plan; those that cannot rate it are left out."""
        found = {}
        alike = not self.request.devices.kinds
        for name in COSTS if alike and plan.chunks == 1 else ():  # published ones know one stage on each device
            rating = _rate(name, plan.stages, self.sizes[plan.samples], self.request)
            if rating is not None:
                found[name] = rating
        return found


def make_plan(request: PlanRequest) -> Planning:
    """Plan with one planner; "default" searches for the best plan and shows what the others find beside it.

    Raises:
        ConfigError: there is no such planner or cost function, they do not go together, or the graph is too large.
        CapabilityError: the profile is of blocks that processes share.
    """
    request = with_cost(request)
    sizes = sizes_for(request)
    if request.cost == SIMULATED:
        decide = stages_decide(request.profile)
        answer = simulated_plans(sizes, request.devices, decides=decide, methods=request.methods)
        why = {} if answer.plans else {"default": answer.why}
        planning = Planning(request, sizes, answer.plans, answer.skipped, why, answer.excluded)
        if not request.devices.shares_link or request.devices.kinds:
            return planning
        shared = with_shared_links(answer.plans, request.profile, request.devices)
        return replace(planning, plans=tuple(shared), excluded=None)  # which was not simulated so
    names = [request.planner]
    if request.planner == "default":  # others search for other costs, and cannot be better by this one
        names += dict.fromkeys((request.cost or "", "2bw-paper"))
    found, left_out, skipped = list[Plan](), dict[str, str](), list[Skipped]()
    for name in names:
        try:
            answer = _same_as_default(name, request, found) or _search(name, request, sizes)
        except ConfigError as error:
            if name == request.planner:
                raise
            left_out[name] = str(error)
            continue
        skipped += answer.skipped if name == request.planner else ()
        rated = None if answer.plan is None else _rated(answer.plan, sizes, request)
        if rated is None:
            left_out[name] = answer.why or f"its plan cannot be rated by {request.cost}"
        elif math.isfinite(rated.rating.seconds):
            found.append(rated)
        else:
            left_out[name] = f"its plan does not fit by {request.cost}: {rated.rating.fault}"
    found.sort(key=lambda plan: (plan.seconds_per_sample, PLANNERS.index(plan.planner)))
    if request.planner == "default" and found and found[0].planner != "default":
        best = replace(found[0], planner="default", notes=(*found[0].notes, f"found by {found[0].planner}"))
        found = [best, *(plan for plan in found if plan.planner != "default")]
    return Planning(request, sizes, tuple(found), tuple(skipped), left_out)


def _same_as_default(name: str, request: PlanRequest, found: list[Plan]) -> Search | None:
    """Return the default planner's answer as that of Piper's, which has looked at no less if nothing is noted."""
    if name == request.cost == "piper" and request.planner == "default" and found and not found[0].notes:
        return Search(replace(found[0], planner="piper"))
    return None


def with_cost(request: PlanRequest) -> PlanRequest:
    """Return a request with its cost function decided on.

    Raises:
        ConfigError: a name is unknown, or the two do not go together.
        CapabilityError: the profile is of blocks that processes share.
    """
    if (parts := request.profile.tensor_parallel) > 1:
        raise CapabilityError(
            f"plans with tensor_parallel={parts}, with which the profile was measured, are not offered yet: planners "
            "would try what does not go with it; plan with a profile without it, or predict runs of your own choice: "
            "penstock profile --rehearse before them, penstock profile FILE --check RUN after them"
        )
    for what, name, known in (("planner", request.planner, PLANNERS), ("cost", request.cost, (*COSTS, None))):
        if name not in known:
            names = [each for each in known if each]
            raise ConfigError(f"{what} must be {in_words(names)}, got {name!r:.80}.{did_you_mean(name, names)}")
    own = request.planner not in ("default", "2bw-paper")
    cost = request.cost or (request.planner if own else _cost_of_source(request))
    if own and cost != request.planner:
        raise ConfigError(
            f"planner {request.planner!r} searches for its own cost function; leave --cost out (the plan is rated by "
            "the others, too), or use planner 'default'"
        )
    if request.methods is not None:
        if cost != SIMULATED:
            raise ConfigError(
                "methods are tried by cost 'simulated' only; leave --methods out, or give --cost simulated"
            )
        there = (*METHODS, SEARCHED.name)
        if set(request.methods) == {SEARCHED.name}:
            raise ConfigError(
                f"{SEARCHED.name} takes depth, width and microbatch size from the best plan of another method that "
                f"flushes: name one, too, as in --methods 1f1b,{SEARCHED.name}"
            )
        unknown = next((name for name in request.methods if name not in there), None)
        if unknown is not None:
            raise ConfigError(
                f"methods that plans know are {in_words(there)}, got {unknown!r:.80}.{did_you_mean(unknown, there)}"
            )
    if request.choices.straight and cost != "pipedream":
        raise ConfigError(f"--straight is a choice of cost 'pipedream', not of {cost!r}; leave it out")
    if request.devices.kinds and cost != SIMULATED:
        raise ConfigError(
            f"the devices differ, which cost 'simulated' of planner 'default' knows, not {cost!r}; give --cost "
            "simulated, or devices that are all alike"
        )
    if request.planner == "2bw-paper" and cost not in ("2bw-paper", "piper"):
        if request.cost:
            raise ConfigError(f"planner '2bw-paper' takes cost '2bw-paper' or 'piper', not {cost!r}")
        cost = "2bw-paper"
    if request.links is not None:
        links_between(request.devices, request.links)  # before a machine is measured
    return replace(request, cost=cost)


def _cost_of_source(request: PlanRequest) -> str:
    """Return the cost function for a profile: that of the program it is from; simulated if it says enough for that."""
    profile = request.profile
    if profile.source in ("pipedream", "piper"):
        return profile.source
    return SIMULATED if profile.can_be_simulated and request.planner == "default" else "2bw-paper"


def sizes_for(request: PlanRequest) -> dict[int, Sized]:
    """Return the graph at every microbatch size that divides the batch.

    Raises:
        ConfigError: none does, or numbers are out of range.
    """
    found = {}
    if request.samples is not None and request.microbatches is not None:
        raise ConfigError("give microbatches per batch or samples per batch, not both")
    for size in sizes_of(request.profile):
        samples = size or 1
        if request.samples is not None:
            check_whole("samples per batch", request.samples, 1, 1 << 30)
            count, rest = divmod(request.samples, samples)
            if rest or not count:
                continue
        else:
            count = request.microbatches or request.profile.microbatches or MICROBATCHES
            check_whole("microbatches per batch", count, 1, 1 << 20)
        found[samples] = Sized(layer_graph(request.profile, size), samples, count)
    if not found:
        known = ", ".join(str(size or 1) for size in sizes_of(request.profile))
        raise ConfigError(f"no profiled microbatch size ({known}) divides a batch of {request.samples} samples")
    return found


def _rated(plan: Plan, sizes: Mapping[int, Sized], request: PlanRequest) -> Plan | None:
    """Return a plan as the cost function of a request rates it; None if it cannot."""
    assert request.cost is not None
    if plan.rating.cost == request.cost:
        return plan
    rating = _rate(request.cost, plan.stages, sizes[plan.samples], request)
    return None if rating is None else replace(plan, rating=rating)


def _rate(cost: str, stages: tuple[PlannedStage, ...], sized: Sized, request: PlanRequest) -> Rating | None:
    """Return what a cost function says of stages; None if it knows no such plans."""
    if cost == SIMULATED:
        return None
    problem = sized.graph, request.devices, sized.microbatches
    if cost == "pipedream":
        deep = len(request.devices.levels) > 1
        known = all(stage.tensor == 1 and (stage.inner or not deep) for stage in stages)
        return PipeDreamCost(*problem, request.choices.compression).rate(stages) if known else None
    if any(stage.inner for stage in stages):
        return None
    if len(stages) > 1 and (cost == "pase") != stages[0].in_turns:
        return None  # a pipeline, or none
    if cost == "spp" and request.cost != "spp":
        return None  # ordering the devices takes long
    try:
        return (SppCost(*problem, request.links) if cost == "spp" else _RATERS[cost](*problem)).rate(stages)
    except ConfigError:  # a layer has no way with the tensor degree of its stage, or no forward apart from its backward
        return None


def _each(sizes: Mapping[int, Sized], search: Callable[[Sized], Search], why: str = "") -> Search:
    """Return the best plan of all microbatch sizes."""
    best, skipped = None, list[Skipped]()
    for sized in sizes.values():
        found = search(sized)
        skipped += found.skipped
        why = why or found.why
        if found.plan is not None:
            plan = replace(found.plan, samples=sized.samples)
            best = plan if best is None or plan.seconds_per_sample < best.seconds_per_sample else best
    return Search(best, tuple(skipped), why)


def _search(name: str, request: PlanRequest, sizes: Mapping[int, Sized]) -> Search:
    """Search with a planner; "default" takes the best search for the cost function."""
    devices, default = request.devices, name == "default"
    named = request.cost if default else name
    if named == "2bw-paper":
        return (
            plan_for_two_bw_cost(sizes, devices) if default else plan_as_two_bw(sizes, devices, request.cost or named)
        )
    if named == "pipedream":
        pipedream = plan_for_pipedream_cost if default else plan_as_pipedream
        return _each(sizes, lambda each: pipedream(each.graph, devices, request.choices))
    if named == "spp":
        return _each(sizes, lambda each: plan_as_spp(each.graph, devices, each.microbatches, request.links))
    search = (_BEST_FOR_COST if default else _AS_PUBLISHED)[named or ""]
    return _each(sizes, lambda each: search(each.graph, devices, each.microbatches))
