"""A second judge of schedules, written without looking at the first: it unrolls spans and replays the equations.

It judges straight pipelines of whole microbatches (one stage per rank, F, B and STEP), by three questions: is
everything there once, can it be run in this order if messages never wait for buffers, and does every pass read the
weights that its rule's equation names, from a version that is still there?
"""

from collections import Counter

from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op

BUFFERS = {"flush": 2, "newest": 2, "double-buffer": 3, "triple-buffer": 4, "stash": None, "vertical-sync": None}


def complaint(schedule):
    """Why the schedule is wrong in some span that is long enough to show every number of its text, or None."""
    for batches in range(1, 3 + _lookback(schedule)):
        programs = [list(actions_of(schedule, rank, batches)) for rank in range(schedule.ranks)]
        why = _coverage(schedule, programs, batches) or _dependencies(programs) or _weights(schedule, programs, batches)
        if why:
            return f"{batches} batches: {why}"
    return None


def _lookback(schedule):
    """How many batches back the text reaches: before that, actions vanish and versions are cut off."""
    actions = [a for program in schedule.programs for part in program for a in part]
    units = [-(a.unit.first // (schedule.microbatches if a.op is not Op.STEP else 1)) for a in actions]
    return max(0, *units, *(-v for a in actions if a.reads for v in a.reads.versions))


def _coverage(schedule, programs, batches):
    m = schedule.microbatches
    wanted = Counter((op, k) for op in (Op.F, Op.B) for k in range(batches * m))
    wanted.update((Op.STEP, t) for t in range(batches))
    for rank, program in enumerate(programs):
        if any(action.stage != (rank, 0, rank) for action in program):
            return f"rank {rank} works on another rank's stage"
        if Counter((action.op, action.unit.first) for action in program) != wanted:
            return f"rank {rank} runs something twice or not at all"
    return None


def _dependencies(programs):
    """Every pass comes after those it needs: run what can be run until nothing is left or nothing moves."""
    places, done = [0] * len(programs), set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                op, _, unit, *_ = program[places[rank]]
                needs = {
                    Op.F: [(Op.F, rank - 1, unit.first)] * (rank > 0),
                    Op.B: [(Op.F, rank, unit.first), *[(Op.B, rank + 1, unit.first)] * (rank + 1 < len(programs))],
                }.get(op, [])
                if not done.issuperset(needs):
                    break
                done.add((op, rank, unit.first))
                places[rank] += 1
                moved = True
    stuck = [str(program[place]) for place, program in zip(places, programs, strict=True) if place < len(program)]
    return f"nobody can go on: {stuck}" if stuck else None


def _weights(schedule, programs, batches):
    admitted = {}
    for rank, program in enumerate(programs):  # rank 0 first: it admits
        why = _weights_of(schedule, rank, program, batches, admitted)
        if why:
            return f"rank {rank}: {why}"
    return None


def _weights_of(schedule, rank, program, batches, admitted):
    rule, m = schedule.rule, schedule.microbatches
    last_reader = {a.reads.versions[0]: i for i, a in enumerate(program) if a.reads}
    newest, flying, left = 0, {}, {}
    for i, action in enumerate(program):
        k, batch = action.unit.first, action.unit.first // m
        if action.op is Op.STEP:
            if left.pop(k, m) or newest != k:
                return f"{action} comes too early or out of turn"
            if rule == "flush" and k in flying.values():
                return f"{action} overwrites weights that are still read"
            newest = k + 1
            continue
        equation = {
            "flush": batch,
            "double-buffer": max(batch - 1, 0),
            "triple-buffer": max(batch - 2, 0),
            "vertical-sync": admitted.get(k, newest),
        }.get(rule, newest)
        if action.op is Op.B and rule != "newest":
            equation = flying[k]
        if action.reads is None or action.reads.versions != (equation,) or action.reads.derive or equation > newest:
            return f"{action} does not read version {equation}"
        if action.op is Op.F:
            flying[k] = equation
            if rank == 0:
                admitted[k] = equation
            continue
        if batch not in left:
            # Two or three bases are handed to the next span: the newest version and those before.
            late = {"double-buffer": 1, "triple-buffer": 2}.get(rule, 0)
            kept = {v for v, last in last_reader.items() if i <= last} | set(range(batches - late, batches))
            versions = {newest} | {v for v in kept if 0 <= v <= newest} if late else {newest}
            if BUFFERS[rule] is not None and len(versions) + len(left) >= BUFFERS[rule]:
                return f"{action} finds no free buffer for its gradient"
            left[batch] = m
        left[batch] -= 1
        del flying[k]
    return None
