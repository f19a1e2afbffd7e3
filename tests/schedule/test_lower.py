"""Lowering: where messages stand, checked on the unrolled instruction streams against the documented machine model."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from penstock.schedule.ir.absolute_actions import actions_of, existing
from penstock.schedule.ir.schedule import Op, Payload
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.lowering.lower import lower
from penstock.schedule.orders import ORDERS
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.apply_version_rule import apply_rule
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
SCHEDULES = [parse_schedule(path.read_text(), path.stem) for path in GOLDEN]
SCHEDULES += [
    make_schedule(method, p, max(m, least(method, p))) for method in CHAINS for p, m in ((2, 1), (3, 2), (4, 5))
]

COLLECTIVES = (Op.REDUCE, Op.TIE, Op.DECIDE, Op.AVERAGE, Op.GATHER)

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.ranks}-{s.microbatches}")
machines = pytest.mark.parametrize(("lookahead", "window"), [(2, 2), (0, 2), (1, 1), (3, 4)])


def stream(lowered, rank, batches):
    """A rank's instructions in a span: ("do", (t, action, messages consumed)), ("send" or "receive", (lane, message)).

    A message is known by its route and the microbatch of the span that its unit begins with. Actions before the first
    batch, which do nothing, keep their place: the program is written only once, and places are counted in it.
    """
    m = lowered.schedule.microbatches
    for t in range(-1, batches + 1):
        part = lowered.programs[rank].epilogue if t == batches else lowered.programs[rank].period
        for instruction in part:
            action, offset = instruction.action, t * m
            if instruction.ahead and t + 1 >= batches:
                continue  # what is posted for the next batch only
            if t < 0 and not instruction.ahead:
                continue
            if instruction.route < 0:
                consumes = [(k.route, k.first + offset) for k in instruction.needs if k.first + offset >= 0]
                yield "do", (t, action, consumes)
            elif action.unit.first + offset >= 0:
                what = "send" if action.op is Op.SEND else "receive"
                yield what, (lowered.routes[instruction.route].lane, (instruction.route, action.unit.first + offset))


def test_the_lowered_form_of_1f1b_by_hand():
    """p = 2, m = 2: SENDs directly behind their producers, RECVs two actions ahead of their consumers."""
    lowered = lower(make_schedule("1f1b", 2, 2))
    rows = []
    for rank in (0, 1):
        program = lowered.programs[rank].period
        rows.append([("+" if i.ahead else "") + str(i.action).split("^")[0] for i in program])
        assert lowered.programs[rank].epilogue == ()
    # B0 is the third action, so its RECV stands in front of the first. The next batch's F0 is two behind this one's B1.
    assert rows[0] == [
        "RECV0@0<1/gradient", "F0@0", "SEND0@0>1/activation", "RECV1@0<1/gradient", "F1@0", "SEND1@0>1/activation",
        "B0@0", "B1@0", "STEP[0]@0",
    ]  # fmt: skip
    assert rows[1] == [
        "RECV1@1<0/activation", "F0@1", "B0@1", "SEND0@1>0/gradient", "F1@1",
        "+RECV2@1<0/activation", "B1@1", "SEND1@1>0/gradient", "STEP[0]@1",
    ]  # fmt: skip


@every_schedule
def test_every_message_is_sent_once_received_once_and_consumed(schedule):
    lowered = lower(schedule)
    for batches in (1, 2, 4):
        found = {"send": Counter(), "receive": Counter(), "consume": Counter()}
        for rank in range(schedule.ranks):
            for what, item in stream(lowered, rank, batches):
                if what == "do":
                    found["consume"].update(item[2])
                else:
                    lane, message = item
                    assert lane[0 if what == "send" else 1] == rank
                    found[what][message] += 1
        assert found["send"] == found["receive"] == found["consume"]
        assert set(found["send"].values()) <= {1}


@every_schedule
def test_both_ends_of_a_lane_use_one_order(schedule):
    lowered = lower(schedule)
    for batches in (1, 3):
        orders = {"send": defaultdict(list), "receive": defaultdict(list)}
        for rank in range(schedule.ranks):
            for what, item in stream(lowered, rank, batches):
                if what != "do":
                    orders[what][item[0]].append(item[1])
        assert orders["send"] == orders["receive"]


@machines
@every_schedule
def test_receives_are_posted_a_little_ahead_and_never_take_too_many_buffers(schedule, lookahead, window):
    """Counted in the receiver's actions but for collectives, which take none of its time.

    At most `lookahead` ahead, and at most `window` posted and not consumed.
    """
    lowered = lower(schedule, lookahead, window)
    for rank in range(schedule.ranks):
        actions, posted, held = 0, {}, Counter()
        for what, item in stream(lowered, rank, 4):
            if what == "receive":
                lane, message = item
                posted[message] = actions, lane
                held[lane] += 1
                assert held[lane] <= window
            elif what == "do":
                for message in item[2]:
                    place, lane = posted.pop(message)
                    assert actions - place <= lookahead
                    held[lane] -= 1
                actions += item[0] >= 0 and item[1].op not in COLLECTIVES
        assert not posted


@every_schedule
def test_sends_stand_directly_behind_their_producer(schedule):
    lowered = lower(schedule)
    for rank in range(schedule.ranks):
        producer = None
        for what, item in stream(lowered, rank, 2):
            if what == "do":
                producer = item[1]
            elif what == "send":
                route = lowered.routes[item[1][0]]
                gives = {
                    Payload.ACTIVATION: (Op.F,),
                    Payload.GRADIENT: (Op.B, Op.I),
                    Payload.RECOMPUTE: (Op.R,),
                    Payload.PARKED: (Op.OFFLOAD, Op.RETURN),
                }
                parts = [p for p in producer.parts or (producer,) if p.op in gives[route.payload]]
                assert any(p.stage == route.source for p in parts)


@every_schedule
def test_nothing_is_posted_for_the_next_batch_before_this_one_has_begun(schedule):
    """The first forward's message carries the decision to continue: RECVs for the next batch stand behind it."""
    for program in lower(schedule, lookahead=3, window=4).programs:
        first = next(
            place for place, i in enumerate(program.period) if any(p.op is Op.F for p in i.action.parts or (i.action,))
        )
        assert all(place > first for place, i in enumerate(program.period) if i.ahead)
        assert not any(i.ahead for i in program.epilogue)


@every_schedule
def test_lowering_adds_messages_and_changes_nothing_else(schedule):
    for program, low in zip(schedule.programs, lower(schedule).programs, strict=True):
        for part in (0, 1):
            assert tuple(i.action for i in low[part] if i.action.op not in (Op.SEND, Op.RECV)) == program[part]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("interleaved", 2 * 4 * 3),  # 2m(pv - 1): the wrap-around is a hop, too
        ("breadth_first", 2 * 2 * 3),
        ("zb_v", 2 * 4 * 2),  # 2m * 2(p - 1): the fold is local
        ("dualpipe_v", 2 * 4 * 2),
        ("chimera", 2 * 4 * 3),  # 2m(p - 1)
        ("zb_h1", 2 * 4 * 2),
        ("seq1f1b", 2 * 2 * 2),  # 2mk(p - 1)
        ("two_branches", 2 * 3 * 2),
        ("frozen_front", 2 * 3 + 3),  # no gradient returns to the frozen stage
        ("local_losses", 2),
        ("evaluation", 2),
        ("nf1b", 4 + 1),  # one message for the gradients of four microbatches
        ("pipemare_recompute", 2 + 2 + 2),  # activations, gradients, recomputed activations
    ],
)
def test_messages_of_a_batch(name, messages):
    schedule = parse_schedule((GOLDEN[0].parent / f"{name}.txt").read_text())
    lowered = lower(schedule)
    sends = [i for program in lowered.programs for i in program.period if i.action.op is Op.SEND]
    assert len(sends) == messages


@every_schedule
def test_instructions_of_a_span_are_those_that_exist(schedule):
    """What is neither before the span nor behind its end; what is posted ahead stands in the period before."""
    lowered, batches = lower(schedule), 2
    for rank in range(schedule.ranks):
        passes = Counter()
        messages = Counter()
        for t in range(-1, batches):
            here = [i for i in lowered.programs[rank].period if (t + 1 < batches if i.ahead else t >= 0)]
            instructions = [i for i in here if existing(i.action, t, schedule.microbatches)]
            passes.update("period" for i in instructions if i.route < 0)
            messages.update(i.action.op for i in instructions if i.route >= 0)
        epilogue = [i for i in lowered.programs[rank].epilogue if existing(i.action, batches, schedule.microbatches)]
        messages.update(i.action.op for i in epilogue if i.route >= 0)
        wanted = Counter(what for what, _ in stream(lowered, rank, batches))
        assert (messages[Op.SEND], messages[Op.RECV]) == (wanted["send"], wanted["receive"])
        assert passes["period"] + sum(i.route < 0 for i in epilogue) == len(list(actions_of(schedule, rank, batches)))


@pytest.mark.slow
def test_a_large_schedule_has_exactly_the_expected_instructions():
    """64 ranks, 256 microbatches: per batch 2pm passes, 2m(p-1) SENDs and as many RECVs, p updates."""
    p, m = 64, 256
    lowered = lower(apply_rule(ORDERS["1f1b"](p, m), RULES["flush"], m, "1f1b"))
    counted = Counter(i.action.op for program in lowered.programs for i in program.period)
    assert counted == {Op.F: p * m, Op.B: p * m, Op.STEP: p, Op.SEND: 2 * m * (p - 1), Op.RECV: 2 * m * (p - 1)}
    assert counted.total() == 97_344
    assert len(lowered.routes) == 2 * (p - 1)
    assert not any(program.epilogue for program in lowered.programs)


def test_a_message_that_a_period_has_taken_is_not_taken_again_to_drain():
    """One backward for four microbatches on rank 1; rank 0 uses its gradient in two periods, half in each."""
    text = """
        rule stash
        microbatches 4
        nodes 0@0 1@1
        rank 0: B-2^t-1 B-1^t-1 STEP[t-1] F0^t F1^t F2^t F3^t B0^t B1^t
        rank 1: F0^t F1^t F2^t F3^t B0..3^t STEP[t]
        drain 0: B-2^t-1 B-1^t-1 STEP[t-1]
    """
    lowered = check(parse_schedule(text)).lowered
    receiver = lowered.programs[0]
    assert [str(i.action) for i in receiver.epilogue] == ["B-2@0^-1", "B-1@0^-1", "STEP[-1]@0"]
    assert sum(i.action.op is Op.RECV for i in receiver.period) == 1
