"""Simulated timelines to draw."""

from dataclasses import replace

from penstock.schedule.add_options import extend
from penstock.schedule.build import prove
from penstock.simulate.costs import Costs
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline


def simulated(
    method="2bw", stages=3, microbatches=3, batches=3, times=(1.0, 1.0, 1.0), latency=0.0, recomputes=False, gather=1.0
):
    """The timeline of a span of a method, on whose network the stages of a rank are gathered in a time."""
    proof = prove(method, stages, microbatches)
    if recomputes:
        proof = extend(proof, recomputes=True, segments=2)
    costs = Costs.uniform(proof.schedule, *times, latency=latency)
    if proof.shards:
        costs = replace(costs, network=Network.of_time(proof.schedule, gather))
    timeline: Timeline = simulate_schedule(proof, costs, batches).timeline
    return timeline
