"""Simulated timelines to draw."""

from penstock.schedule.build import prove
from penstock.schedule.extend import extend
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule
from penstock.timeline import Timeline


def simulated(method="2bw", stages=3, microbatches=3, batches=3, times=(1.0, 1.0, 1.0), latency=0.0, recomputes=False):
    """The timeline of a span of a method."""
    proof = prove(method, stages, microbatches)
    if recomputes:
        proof = extend(proof, recomputes=True, segments=2)
    timeline: Timeline = simulate_schedule(
        proof, Costs.uniform(proof.schedule, *times, latency=latency), batches
    ).timeline
    return timeline
