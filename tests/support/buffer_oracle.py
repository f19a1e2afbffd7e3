"""A second simulator of its own, for straight pipelines: the machine of the documentation, buffers included.

Each rank runs its steps in order on one clock. A send waits until the one `window` earlier on its lane has completed; a
receive is posted at most `lookahead` actions ahead of its consumer, behind the consumer of the message `window`
earlier, in the period before only behind that period's first forward, and never ahead of a drain. A message arrives
`latency` after both its ends are posted.
"""

from penstock.schedule.ir.absolute_actions import shift
from penstock.schedule.ir.schedule import Op

WAITS = {Op.F: -1, Op.B: 1}
"""The neighbour whose forward or backward a pass waits for; the other neighbour waits for this one's."""


def bounded_times(schedule, duration, latency, batches, lookahead=2, window=2):
    """Per rank, (action, start, end) of every action of a span, on a machine with `window` buffers per lane."""
    steps = [_steps(schedule, rank, batches, lookahead, window) for rank in range(schedule.ranks)]
    clock, done = [0] * schedule.ranks, [[] for _ in steps]
    sent, posted, completed, lanes = {}, {}, {}, {}
    progress = True
    while progress:
        progress = False
        for rank, todo in enumerate(steps):
            while todo:
                kind, lane, item = todo[0]
                message = lane and (lane, item.unit.first)
                if kind == "send":
                    order = lanes.setdefault(lane, [])
                    buffer = order[-window] if len(order) >= window else None
                    if buffer is not None and buffer not in completed:
                        break
                    clock[rank] = sent[message] = max(clock[rank], completed.get(buffer, 0))
                    order.append(message)
                elif kind == "receive":
                    posted[message] = clock[rank]
                else:
                    if lane and message not in completed:
                        break
                    start = max(clock[rank], completed[message] if lane else 0)
                    clock[rank] = start + duration(item)
                    done[rank].append((item, start, clock[rank]))
                if message in sent and message in posted:
                    completed[message] = max(sent[message], posted[message]) + _of_link(latency, *lane[:2])
                todo.pop(0)
                progress = True
    assert not any(steps), f"the order waits for itself: {[todo[0] for todo in steps if todo]}"
    return done


def _of_link(latency, source, target):
    return latency[min(source, target)] if isinstance(latency, tuple) else latency


def _steps(schedule, rank, batches, lookahead, window):
    """Sends, receives and actions of a rank as (kind, lane, action), in order."""
    program = schedule.programs[rank]
    parts = [(program.period, t) for t in range(batches)] + [(program.epilogue, batches)]
    actions = [(part, shift(a, t, schedule.microbatches), a.op) for part, (row, t) in enumerate(parts) for a in row]
    begins = [next((i for i, a in enumerate(actions) if a[0] >= part), len(actions)) for part in range(batches + 1)]
    receives, uses = {}, {}
    for position, (part, action, op) in enumerate(actions):
        neighbour = rank + WAITS.get(op, len(schedule.programs))
        if not 0 <= neighbour < schedule.ranks:
            continue
        earliest = begins[part]
        if 0 < part < batches:
            earliest = 1 + next(i for i in range(begins[part - 1], begins[part]) if actions[i][2] is Op.F)
        earlier = uses.setdefault(op, [])
        free = earlier[-window] + 1 if len(earlier) >= window else 0
        earlier.append(position)  # places of passes before the first batch count, too: a program is written once
        if action is not None:
            place = max(position - lookahead, free, earliest if part else 0)
            receives.setdefault(place, []).append(("receive", (neighbour, rank, op), action))
    steps = []
    for position, (_, action, op) in enumerate(actions):
        steps += receives.get(position, ())
        if action is not None:
            towards = WAITS.get(op, len(schedule.programs))
            lane = (rank + towards, rank, op) if 0 <= rank + towards < schedule.ranks else None
            steps.append(("do", lane, action))
            if op in WAITS and 0 <= rank - towards < schedule.ranks:
                steps.append(("send", (rank, rank - towards, op), action))
    return steps
