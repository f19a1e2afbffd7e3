"""Published figures about time, memory and scale, beside what Penstock computes: a row each.

`python tests/support/published_cases.py` prints the tables and writes them to docs/published-figures.md anew. Rows
marked "open" do not reproduce, or cannot be tried, for the reason that they give. Machines are the presets of
penstock.plan.cluster; what is fitted says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from penstock.plan.cluster.schema import find_cluster
from penstock.plan.scale.fastest import (
    AXES,
    Layouts,
    Rated,
    ScaledTraining,
    fastest,
    memory_of,
    offloads,
    one_layout,
    rate,
    transfers,
)
from penstock.plan.scale.model_shape import ModelShape, critical_batch, family_model, samples_at, steps_at
from penstock.plan.scale.report import BASELINE, IMPROVED
from penstock.plan.scale.rules_file import read_rules
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.simulate import simulate_schedule
from support import published_2bw, published_delays, published_schedules
from support.published_case import Case
from support.zero_bytes import state_bytes_of_zero

PAGE = Path(__file__).parents[2] / "docs" / "published-figures.md"
LGA, BFPP, PTD_P = "arXiv 2106.02679", "arXiv 2211.05953", "arXiv 2104.04473"
GIB, DAY, YEAR = 2.0**30, 86400.0, 365.25 * 86400.0
RULES, A100 = read_rules(), find_cluster("a100-lga")


def x_training(x: float = 160) -> ScaledTraining:
    """The training of a model of the family, by LGA's rules."""
    shape = family_model(x, RULES)
    return ScaledTraining(shape, A100, RULES, critical_batch(shape, RULES, x), RULES.steps.value)


X160 = x_training()
NONE = one_layout(1, 1, 1, 604, 4, layered=False, sharded=True)
DATA = one_layout(483, 1, 1, 1, 5, layered=True, sharded=True)
IMPROVED_3D = one_layout(483, 5, 16, 5, 1, layered=True, sharded=True)


def rated(layouts: Layouts) -> Rated:
    return rate(X160, layouts)


def best_of(way: str) -> Rated:
    found, _ = fastest(X160, AXES, layered=way == IMPROVED)
    assert found is not None
    return found


def held(layouts: Layouts, kind: str, shape: ModelShape = X160.shape) -> float:
    return float(memory_of(shape, RULES, layouts)[kind][0]) / GIB


def family() -> Iterator[Case]:
    """Section 5 of our notes on LGA: the family and its critical batch."""
    for x, parameters, batch, state in (
        (32, 4.03e8, 827, 4.5),
        (108, 1.76e11, 1860, 1970.5),
        (160, 1.258e12, 2417, 14062.5),
    ):
        t = x_training(x)
        yield Case(f"X_{x}: parameters", f"{LGA}, derived", parameters, lambda t=t: t.shape.parameters)
        yield Case(f"X_{x}: critical batch, sequences", f"{LGA}, derived", batch, lambda t=t: t.critical)
        yield Case(
            f"X_{x}: state, GiB", f"{LGA}, derived", state,
            lambda t=t: held(one_layout(1, 1, 1, 1, 1, layered=False, sharded=True), "state", t.shape),
        )  # fmt: skip
    yield Case("X_160: critical batch as printed", LGA, 2.42e3, lambda: X160.critical)
    yield Case(
        "X_160: critical batch from GPT-3's by p^(1/3)", "arXiv 2005.14165, derived", 2417,
        lambda: critical_batch(X160.shape, RULES),
    )  # fmt: skip
    yield Case(
        "X_160: checkpoint of a layer and sequence, MiB", LGA, 125, lambda: held(DATA, "checkpoints") * 1024 / 800
    )
    yield Case("X_160: three buffers of a layer, GiB", LGA, 43.9, lambda: held(DATA, "buffers"))
    yield Case("X_160, one device, depth-first: checkpoints, GiB", LGA, 78.1, lambda: held(NONE, "checkpoints"))
    yield Case(
        "X_160, one device, layered: checkpoints, GiB", f"{LGA}, derived", 47187,
        lambda: held(one_layout(1, 1, 1, 604, 4, layered=True, sharded=True), "checkpoints"),
    )  # fmt: skip
    yield Case("X_160, data, layered: state, GiB", f"{LGA}, derived", 29.1, lambda: held(DATA, "state"))
    yield Case("X_160, data, layered: checkpoints, GiB", LGA, 97.7, lambda: held(DATA, "checkpoints"))


def intensities() -> Iterator[Case]:
    """Operations per byte of X_160, and the thresholds of A100s."""
    ordinary = one_layout(2, 1, 1, 5, 1, layered=False, sharded=False)
    kinds = {
        "replicated, depth-first": (ordinary, "sum of gradients", 1920),
        "replicated, layered, 5 microbatches": (
            one_layout(2, 1, 1, 5, 1, layered=True, sharded=False), "sum of gradients", 9600,
        ),
        "sharded, depth-first, forward": (
            one_layout(2, 1, 1, 5, 1, layered=False, sharded=True), "gather, forward", 1280,
        ),
        "sharded, layered, forward": (IMPROVED_3D, "gather, forward", 6400),
        "sharded, layered, backward": (IMPROVED_3D, "gather and sum, backward", 9600),
        "messages, modular, 16 devices to a layer": (IMPROVED_3D, "messages", 19200),
        "messages, modular": (one_layout(2, 5, 1, 5, 1, layered=True, sharded=True), "messages", 307200),
        "shared layers, 16 devices": (IMPROVED_3D, "shared layers", 5120),
    }  # fmt: skip
    for name, (layout, key, value) in kinds.items():
        yield Case(
            f"X_160, operations per byte: {name}", f"{LGA}, derived", value,
            lambda a=layout, k=key: float(transfers(X160.shape, RULES, a)[k].intensity[0]),
        )  # fmt: skip
    for name, key, value in (("checkpoints", "offload of checkpoints", 614400), ("state", "offload of state", 6.2e6)):
        yield Case(
            f"X_160, operations per byte: offload of {name}", f"{LGA}, derived", value,
            lambda k=key: float(offloads(X160.shape, RULES, IMPROVED_3D)[k].intensity[0]),
        )  # fmt: skip
    for link, value in (("inside", 520), ("between", 6240), ("host", 4950), ("disk", 97500)):
        yield Case(
            f"A100, operations per byte to hide: {link}", f"{LGA}, derived", value, lambda n=link: A100.threshold(n)
        )
    yield Case(
        "A100, operations per byte to hide: host, as LGA counts", LGA, 9900, lambda: 2 * A100.threshold("host"),
        why="with 31.5 GB/s for a device, one direction of its link, as the paper divides; with both it is 4952",
    )  # fmt: skip


def training_times() -> Iterator[Case]:
    """How long X_160 takes."""
    day = 1 / DAY
    yield Case("X_160, one A100: years", f"{LGA}, derived", 632, lambda: float(rated(NONE).seconds[0]) / YEAR)
    yield Case("X_160, one A100: years, as printed", LGA, 630, lambda: float(rated(NONE).seconds[0]) / YEAR)
    yield Case("X_160, 483 A100, data: years", LGA, 1.3, lambda: float(rated(DATA).seconds[0]) / YEAR, 0.01)
    three = rated(IMPROVED_3D)
    yield Case("X_160, 483 x 5 x 16: devices", LGA, 38640, lambda: float(IMPROVED_3D.devices[0]))
    yield Case("X_160, 483 x 5 x 16: pipeline overhead", LGA, 0.025, lambda: float(three.parts["bubble"][0]))
    yield Case("X_160, 483 x 5 x 16: tensor overhead", LGA, 0.102, lambda: float(three.parts["shared layers"][0]))
    yield Case("X_160, 483 x 5 x 16: efficiency", LGA, 0.9, lambda: float(three.efficiency[0]), 0.02)
    yield Case("X_160, 483 x 5 x 16: days", LGA, 6.8, lambda: float(three.seconds[0]) * day, 0.01)
    yield Case(
        "X_160, the fastest layered layout found: days", LGA, 6.8, lambda: float(best_of(IMPROVED).days[0]), 0.01
    )
    yield Case(
        "X_160, the fastest layered layout found: devices", LGA, 38640,
        lambda: float(best_of(IMPROVED).layouts.devices[0]),
    )  # fmt: skip
    yield Case(
        "X_160, shortest time, depth-first / layered: \"half\"", f"{LGA}, abstract", 2.0,
        lambda: float(best_of(BASELINE).seconds[0] / best_of(IMPROVED).seconds[0]), 0.15,
        why="with at least half of the time compute, our assumption; the paper's limit is not known to us",
    )  # fmt: skip
    hiding = replace(X160, rules=RULES.model_copy(update={"most_exposed": 0.0}))
    yield Case(
        "X_160, layered, data only, the fastest found: devices", LGA, 483,
        lambda: float(fastest(hiding, ("data",), layered=True)[1].layouts.devices[0]),
        why="all traffic is hidden, as in the paper; paying for some of it is faster, with 1208 devices",
    )  # fmt: skip


def zero() -> Iterator[Case]:
    """ZeRO's memory, and batch theory."""
    for stage, gigabytes in enumerate((120.0, 31.4, 16.6, 1.9)):
        yield Case(
            f"ZeRO, 7.5 B parameters, 64 devices, stage {stage}: GB", "arXiv 1910.02054", gigabytes,
            lambda s=stage: state_bytes_of_zero(7.5e9, 64, s) / 1e9, 0.015,
        )  # fmt: skip
    yield Case("steps at the critical batch, in least steps", "arXiv 2001.08361", 2.0, lambda: steps_at(5.0, 5.0, 1.0))
    yield Case(
        "samples at the critical batch, in least samples", "arXiv 2001.08361", 2.0, lambda: samples_at(5.0, 5.0, 1.0)
    )


MEGATRON = (  # billions, layers, hidden, devices, batch, teraFLOP/s of a device, petaFLOP/s of all, seconds (derived)
    (1.7, 24, 2304, 32, 512, 137, 4.4, 3.53),
    (18.4, 40, 6144, 256, 1024, 135, 34.6, 9.40),
    (145.6, 80, 12288, 1536, 2304, 148, 227.1, 24.82),
    (1008.0, 128, 25600, 3072, 3072, 163, 502.0, 102.6),
)


def megatron() -> Iterator[Case]:
    """Parameters, operations and times of Megatron's runs on A100s."""
    for billions, layers, hidden, devices, batch, rate_, together, seconds in MEGATRON:
        shape = ModelShape("gpt", layers, hidden, 2048, max(1, hidden // 128), vocabulary=51200)
        name = f"GPT of {billions} B"
        yield Case(
            f"{name}: parameters, billions", PTD_P, billions, lambda s=shape: s.parameters / 1e9, 0.06 / billions + 1e-4
        )
        yield Case(f"{name}: petaFLOP/s of all", PTD_P, together, lambda n=devices, r=rate_: n * r / 1e3)
        yield Case(
            f"{name}: seconds of an iteration", f"{PTD_P}, derived", seconds,
            lambda s=shape, b=batch, n=devices, r=rate_: b * s.sequence_flops(RULES) / (n * r * 1e12),
        )  # fmt: skip
    for parameters, tokens, devices, rate_, days in (
        (175e9, 300e9, 1024, 140e12, 34),
        (1008e9, 450e9, 3072, 163e12, 84),
    ):
        yield Case(
            f"{parameters / 1e9:.0f} B parameters, {tokens / 1e9:.0f} B tokens on {devices}: days", PTD_P, days,
            lambda p=parameters, t=tokens, n=devices, r=rate_: RULES.work * t * p / (n * r) / DAY,
        )  # fmt: skip


ZERO_3 = {384: (4, 144.0), 768: (2, 88.0), 1536: (1, 44.0)}  # devices: microbatch, teraFLOP/s
COMPUTE, NETWORK = 144.0 / 312.0, 44.0 / 68.2
"""Shares of the A100 preset's numbers that this cluster reaches, fitted to the first and the last of three rows."""


def zero_rate(devices: int) -> float:
    """TeraFLOP/s of a device with ZeRO-3: as fast as compute, or as the network moves weights and gradients."""
    machine = find_cluster("a100")
    microbatch, _ = ZERO_3[devices]
    layout = one_layout(devices, 1, 1, 1, microbatch, layered=True, sharded=True)
    shape = ModelShape("gpt", 96, 12288, 2048, 96)
    times = transfers(shape, RULES, layout)
    per_compute = sum(
        float((each.share / each.intensity)[0]) * machine.flops.value / machine.between.value
        for name, each in times.items()
        if name.startswith("gather")
    )
    return machine.flops.value / 1e12 / max(1 / COMPUTE, per_compute / NETWORK)


def bubbled(devices: int) -> float:
    """The busy part of 1F1B's time with a batch of 1536, a sample a microbatch, on pipelines of 96 devices."""
    microbatches = 1536 // (devices // 96)
    costs = Costs((StageCost(1.0, 1.5, 1.5),) * 12)
    return microbatches * 4.0 / simulate_schedule(prove("1f1b", 12, microbatches), costs, 1).bubble.makespan


def data_parallel() -> Iterator[Case]:
    """Throughput of sharded data parallelism on a network."""
    for devices, (_, published) in ZERO_3.items():
        fitted = "fitted" if devices != 768 else "predicted with the constants that fit the other two"
        yield Case(
            f"ZeRO-3, 174.6 B, {devices} A100: teraFLOP/s", PTD_P, published, lambda n=devices: zero_rate(n), 0.02,
            why=f"{fitted}: {COMPUTE:.2f} of the peak, {NETWORK:.2f} of the network",
        )  # fmt: skip
    for devices, published in ((768, 149 / 153), (1536, 141 / 153)):
        yield Case(
            f"PTD-P, 174.6 B, {devices} A100 over 384: teraFLOP/s", PTD_P, published,
            lambda n=devices: bubbled(n) / bubbled(384), 0.02,
            why="of 96 devices a pipeline 12 stages of 8, which the paper does not say; only the bubble grows",
        )  # fmt: skip
    yield Case(
        "MFU with two gathers in place of one, 82 % communication, 1.5 times the tokens: %", "marin issue 6304", 7.18,
        lambda: 9.37 * 1.5 / (0.82 * 2 + 0.18 * 1.5), 0.03,
    )  # fmt: skip
    yield Case(
        "52 B on 64 V100, small batch: gain of breadth-first over depth-first, %", f"{BFPP}, abstract", 43.0, None,
        why="layouts, batch and efficiency of both are not known to us", open=True,
    )  # fmt: skip


def overhead(method: str, chunks: int, microbatches: int, latency: float = 0.0) -> float:
    """Idle time over compute on four ranks, forwards of 1 and backwards of 3."""
    proof = prove(method, 4, microbatches, options={"chunks": chunks} if chunks > 1 else {})
    schedule = proof.schedule
    costs = Costs((StageCost(1.0, 1.5, 1.5),) * schedule.num_stages, latency=latency)
    found = simulate_schedule(schedule, costs, 1)
    return found.bubble.makespan / (microbatches * chunks * 4.0) - 1


def schedules() -> Iterator[Case]:
    """Overheads and counts of looped pipelines."""
    for method, chunks, m, delta, value, source in (
        ("gpipe", 1, 8, 0.0, 0.375, PTD_P),
        ("1f1b", 1, 8, 0.0, 0.375, PTD_P),
        ("breadth-first", 4, 8, 0.0, 0.09375, f"{BFPP}, derived"),
        ("interleaved", 4, 8, 0.0, 0.09375, PTD_P),
        ("breadth-first", 4, 4, 0.0, 0.1875, f"{BFPP}, derived"),
        ("breadth-first", 4, 4, 0.25, 0.305, f"{BFPP}, derived"),
    ):
        late = f", hops of {delta}" if delta else ""
        yield Case(
            f"{method}, 4 ranks x {chunks}, {m} microbatches{late}: overhead", source, value,
            lambda a=method, b=chunks, c=m, d=delta: overhead(a, b, c, d),
        )  # fmt: skip
    for method, restores, reductions, peak in (("breadth-first", 6, 4, 32), ("interleaved", 20, 8, 19)):
        name = f"{method}, 4 ranks x 4, 8 microbatches"
        yield Case(f"{name}: gathers of rank 0", f"{BFPP}, derived", restores, lambda a=method: counts(a)[0])
        yield Case(f"{name}: sums of rank 0", f"{BFPP}, derived", reductions, lambda a=method: counts(a)[1])
        yield Case(f"{name}: stage inputs held, most", f"{BFPP}, derived", peak, lambda a=method: counts(a)[2])
    for method, times in (
        ("breadth-first", (0.49, 0.66, 0.83, 1.0)),
        ("interleaved", (0.74, 0.83, 0.91, 1.0)),
    ):
        for at, value in enumerate(times):
            yield Case(
                f"{method}: gradient {at + 1} of 4 on rank 0 is complete, of the batch", f"{BFPP}, derived", value,
                lambda a=method, n=at: complete(a)[n], 0.01,
            )  # fmt: skip


def counts(method: str) -> tuple[float, float, float]:
    """Gathers and sums of rank 0 with two buffers of each kind, and the most stage inputs that a rank holds."""
    proof = prove(method, 4, 8, options={"chunks": 4}, sharding="full:weights=2:gradients=2:cache=direct")
    order = prove(method, 4, 8, options={"chunks": 4}).schedule
    held = 0
    for rank in range(4):
        now = 0
        for action in order.programs[rank].passes():
            now += {Op.F: 1, Op.B: -1}.get(action.op, 0)
            held = max(held, now)
    return proof.shards[0].gathers, proof.shards[0].reductions, held


def complete(method: str) -> list[float]:
    """When each stage of rank 0 has done its last backward, in parts of the batch."""
    schedule = prove(method, 4, 8, options={"chunks": 4}).schedule
    found = simulate_schedule(schedule, Costs((StageCost(1.0, 1.5, 1.5),) * schedule.num_stages), 1)
    last: dict[int | None, float] = {}
    for interval in found.timeline.work(0):
        if interval.what == "B":
            last[interval.stage] = max(interval.end, last.get(interval.stage, 0.0))
    return sorted(end / found.bubble.makespan for end in last.values())


def groups() -> dict[str, list[Case]]:
    """All of them, by what they are about: the names of the tables."""
    found = {
        "scale": (family, intensities, training_times, zero, megatron, data_parallel, schedules),
        "orders": (published_schedules.zero_bubble, published_schedules.flushed),
        "delays": (published_delays.delays,),
        "2bw": (published_2bw.timelines, published_2bw.speeds, published_2bw.memory),
        "planners": (published_2bw.planners,),
    }
    return {name: [case for make in makers for case in make()] for name, makers in found.items()}


def row_of(case: Case) -> str:
    """A line of a table."""
    if case.obtained is None:
        return f"| {case.what} | {case.source} | {case.expected:.6g} | | | open: {case.why} |"
    value = case.obtained()
    error = value / case.expected - 1
    said = f"open: {case.why}" if case.open else case.why
    return f"| {case.what} | {case.source} | {case.expected:.6g} | {value:.6g} | {error:+.2%} | {said} |"


def table(cases: list[Case]) -> str:
    """A whole table."""
    head = "| figure | source | expected | obtained | error | |\n|---|---|---|---|---|---|\n"
    return head + "".join(row_of(case) + "\n" for case in cases)


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, cases in groups().items():
        found = table(cases)
        sys.stdout.write(found)
        begin, end = f"<!-- published {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = before + begin + found + end + rest.partition(end)[2]
    PAGE.write_text(page)
