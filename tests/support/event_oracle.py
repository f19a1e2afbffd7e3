"""An event simulator of its own: earliest start times from dependencies alone, messages never wait for buffers.

It shares nothing with `penstock.schedule.machine.play` but the unrolled actions: no lowering, no lanes, no clocks.
Every action starts when the one before it on its rank has ended and when all it needs has arrived; repeated until
nothing is left. HOLD, and FETCH from a peer, need nothing: what uses the activations behind them needs these. On a
machine whose buffers do not run out the simulator must give these times exactly.
"""

from itertools import pairwise

from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Kind, Op


def start_times(schedule, duration, latency, batches):
    """Per rank, (action, start, end) of every action of a span; `duration` maps an action to its time."""
    todo = [list(actions_of(schedule, rank, batches)) for rank in range(schedule.ranks)]
    done = [[] for _ in todo]
    born = {}  # fact -> (when it exists, on which rank)
    fetched = set()  # what comes back from a peer: stage, microbatch, slice
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(todo):
            while actions and all(fact in born for fact in _needed(schedule, actions[0], fetched)):
                action = actions.pop(0)
                needed = map(born.get, _needed(schedule, action, fetched))
                ready = [time + _latency(latency, at, rank) for time, at in needed]
                start = max([done[rank][-1][2] if done[rank] else 0, *ready])
                end = start + duration(action)
                done[rank].append((action, start, end))
                for fact in _given(action):
                    born[fact] = end, rank
                if action.op is Op.FETCH and action.peer:
                    fetched |= {(stage, k, piece) for _, stage, k, piece in _pieces(action)}
                progress = True
    assert not any(todo), f"the order waits for itself: {[str(actions[0]) for actions in todo if actions]}"
    return done


def _latency(latency, at, rank):
    """One for all links; or one for each of neighbours, of which the longest on the way counts."""
    links = latency if isinstance(latency, tuple) else [latency] * max(at, rank)
    return max((each for link, each in enumerate(links) if min(at, rank) <= link < max(at, rank)), default=0)


def _pieces(action):
    for part in action.parts or (action,):
        if part.unit.kind is not Kind.BATCH:
            for k in range(part.unit.first, part.unit.first + part.unit.count):
                yield part.op, part.stage, k, part.unit.slice or (0, 1)


def _given(action):
    for op, stage, k, (piece, _) in _pieces(action):
        what = {Op.F: "F", Op.B: "G", Op.I: "G", Op.R: "R"}.get(op)
        if what:
            yield what, stage.index, stage.direction, k, piece
        if op is Op.OFFLOAD and action.peer:
            yield "sent", stage.index, stage.direction, k, piece
        if op is Op.RETURN:
            yield "sent back", action.peer.index, action.peer.direction, k, piece


def _needed(schedule, action, fetched):
    own = set(_given(action))
    facts = []
    for op, stage, k, (piece, pieces) in _pieces(action):
        index, direction, _ = stage
        if (stage, k, (piece, pieces)) in fetched and op not in (Op.HOLD, Op.RETURN, Op.FETCH):
            facts.append(("sent back", index, direction, k, piece))
        if op is Op.F:
            facts += [("F", e.source, direction, k, piece) for e in schedule.edges if e.target == index]
            facts += [("F", index, direction, k, piece - 1)] * (piece > 0)
        if op in (Op.B, Op.I):
            facts += [("G", e.target, direction, k, piece) for e in schedule.edges if e.source == index and e.backward]
            facts += [("G", index, direction, k, piece + 1)] * (piece + 1 < pieces)
        if op is Op.RETURN:
            facts.append(("sent", action.peer.index, action.peer.direction, k, piece))
        if op is Op.R:
            for segment in schedule.segments:
                facts += [("R", a, direction, k, piece) for a, b in pairwise(segment) if b == index]
    return [fact for fact in facts if fact not in own]
