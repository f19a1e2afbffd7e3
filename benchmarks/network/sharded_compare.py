"""The simulator beside measured times of parallel pipelines, with what they share taken into account step by step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import penstock
from benchmarks.network.arms import MODELS, PARALLEL, Case, case_named
from benchmarks.network.compare import TOLERANCE, WAITS, Row, clock_means, message_costs, stage_costs
from benchmarks.network.hosts import LINKS
from benchmarks.network.sharded_arms import CHUNKS, WIDTH
from penstock.schedule.ir.schedule import Op
from penstock.schedule.ir.sharding import Level
from penstock.schedule.machine.shared_machine import SharedCores, SharedLinks
from penstock.schedule.proof.proof import Proof
from penstock.simulate.costs import Costs
from penstock.simulate.play import play
from penstock.simulate.sharding_traffic import Network as Traffic


class Inputs(NamedTuple):
    """What the simulator is told of a turn beside its passes.

    Attributes:
        name: for the table.
        links: whether all that leaves a rank or comes to it shares its link.
        work: nanoseconds of a core that a byte of a gather or sum takes; none if it is measured, and takes a core.
        others: whether ranks wait for all that other processes take of the cores, or for nothing of it; the truth lies
            between the two.
    """

    name: str
    links: bool = True
    work: float | None = 0.0
    others: bool = False


ALONE = 5.0
"""Nanoseconds that a byte of a gather or sum takes longer than on the link, where nothing else happens."""

STEPS = (
    Inputs("own lanes", links=False),
    Inputs("shared links"),
    Inputs("and work of transfers", work=ALONE),
    Inputs("and shared cores", work=None),
    Inputs("with other processes", work=None, others=True),
)


class CoreWork(NamedTuple):
    """What a turn took of cores.

    Attributes:
        means: of passes and updates, by "stage:operation".
        message: of either end.
        byte: of a transfer, of the rank that sends it while it receives another one.
    """

    means: dict[str, float]
    message: float
    byte: float


def core_work(row: Row, message_bytes: int, others: bool = False) -> CoreWork | None:
    """Divide what a turn took of cores among passes, messages and bytes; None where that was not measured.

    What the threads beside a rank's own one take is that of bytes, and what its own takes beside passes and waits that
    of messages. All takes longer by the interrupts of the kernel, by what the host of this machine took, and, if so
    asked, by what other processes did.
    """
    ranks = row["ranks"]
    if "threads" not in ranks[0]:
        return None
    means, ends = dict[str, float](), 0
    passes = waits = own = sent = 0.0
    for rank in ranks:
        taken = rank["cores"]
        for name, (count, _) in rank["work"].items():
            if name.split(":")[1] in ("F", "B", "STEP"):
                means[name] = means.get(name, 0.0) + taken[name] / count / WIDTH
                passes += taken[name]
        waits += sum(taken.get(name, 0.0) for name in WAITS)
        own += rank["threads"]["MainThread"][0]
        sent += rank["sent"]
        ends += 2 * sum(count for lane, (count, *_) in rank["messages"].items() if ">" in lane)
    cpu = sum(rank["cpu"] for rank in ranks)
    machine = row["cores"]
    lost = machine["stolen"] + (machine["busy"] - cpu if others else machine["interrupts"])
    longer = 1 + lost / (cpu - waits)
    byte = longer * (cpu - own) / sent
    message = longer * (own - passes - waits) / ends + byte * message_bytes / 2
    return CoreWork({name: longer * mean for name, mean in means.items()}, message, byte)


def proof_of(method: str, case: Case) -> Proof:
    """Prove the schedule of an arm of Penstock, with the sums of parallel pipelines."""
    task, depth = MODELS[case.model].task, case.hosts // WIDTH
    arm = penstock.Pipeline(
        task.stages(depth * CHUNKS),
        method=penstock.method(method, chunks=CHUNKS),
        stages=depth,
        microbatches=case.m,
        loss=task.loss,
        optimizer=task.optimizer,
        partition=[1] * depth * CHUNKS,
        data_parallel=WIDTH,
    )
    assert isinstance(arm.proof, Proof)
    return arm.proof


def predict(row: Row, proof: Proof, inputs: Inputs, cores: int) -> float | None:
    """Return the seconds that the simulator finds for a run, with the gathers at its end.

    Args:
        row: a turn.
        proof: its schedule.
        inputs: what else the simulator is told; None is returned where that was not measured.
        cores: of the machine, for all pipelines.
    """
    case, link = case_named(row["case"]), LINKS[row["link"]]
    model, schedule = MODELS[case.model], proof.schedule
    work: CoreWork | None = CoreWork(clock_means(row), 0.0, (inputs.work or 0.0) / 1e9)
    if inputs.work is None:
        work = core_work(row, model.message, inputs.others)
    if work is None:
        return None
    size = sum(p.numel() for part in model.task.stages(1) for p in part.parameters()) / schedule.num_stages
    traffic = Traffic(schedule, WIDTH, 1 / link.occupied(1), size, work=work.byte)
    costs = Costs(
        stage_costs(work.means, schedule.num_stages),
        **message_costs(link, model.message),
        network=traffic,
        send=work.message,
        receive=work.message,
        cores=SharedCores(cores / WIDTH) if inputs.work is None else None,
        links=SharedLinks() if inputs.links else None,
    )
    seconds = play(proof.lowered, costs, row["microbatches"] // case.m)[0].makespan
    if schedule.sharding.level is Level.FULL:
        slower = max(case.hosts / cores, 1.0) if inputs.work is None else 1.0
        sent = traffic.sent_for(Op.GATHER, schedule.stages[0])
        seconds += CHUNKS * (link.occupied(sent) + slower * work.byte * sent)
    return seconds


def print_comparison(rows: Sequence[Row], cases: Sequence[Case], links: Sequence[str], cores: int) -> None:
    """Print the milliseconds per batch that were measured, and over those that were simulated, as Markdown.

    Args:
        rows: turns; the longest of each kind count.
        cases: with their arms.
        links: by name.
        cores: of the machine.
    """
    print("\n| arm | m | link | measured | " + " | ".join(f"/ {each.name}" for each in STEPS) + " |")
    print("|---" * (4 + len(STEPS)) + "|")
    within, number = [0] * len(STEPS), 0
    for case in cases:
        for method in PARALLEL:
            arm = f"penstock {method} x 2"
            if arm not in case.arms:
                continue
            proof = proof_of(method, case)
            for link in links:
                here = [r for r in rows if (r["case"], r["arm"], r["link"]) == (case.name, arm, link)]
                if not here:
                    continue
                most = max(r["microbatches"] for r in here)
                here = [r for r in here if r["microbatches"] == most]
                cells = [f"{1e3 * case.m / most * statistics.median(r['seconds'] for r in here):.0f}"]
                number += 1
                for place, step in enumerate(STEPS):
                    found = [(r["seconds"], predict(r, proof, step, cores)) for r in here]
                    ratios = [measured / simulated for measured, simulated in found if simulated is not None]
                    cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
                    within[place] += bool(ratios) and abs(statistics.median(ratios) - 1) <= TOLERANCE
                print(f"| {arm} | {case.m} | {link} | {' | '.join(cells)} |")
    said = ", ".join(f"{count} with {step.name}" for count, step in zip(within, STEPS, strict=True))
    print(f"\nwithin 10 % of {number}: {said}")
