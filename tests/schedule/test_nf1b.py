"""nF1B and the version rules of TiMePReSt: the order against its slots, what is derived against counting by hand."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.errors import CapabilityError, ConfigError, ScheduleError
from penstock.runtime.plan.capabilities import check_offered
from penstock.schedule.build import prove, smallest_microbatches
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import Op, Schedule
from penstock.schedule.lowering.lower import lower
from penstock.schedule.orders.nf1b import version_difference
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

METHODS = ("timeprest", "v-timeprest", "i-timeprest")

# arXiv 2410.14312 (FGCS 178, 108260), fig. 2c: 3 stages, 2 microbatches.
FIGURE = """
F0 F1 F2 F3 F4 F5 B0..1 F6 F7 B2..3 F8 F9 B4..5 B6..7 B8..9
F0 F1 F2 F3 B0..1 F4 F5 B2..3 F6 F7 B4..5 F8 F9 B6..7 B8..9
F0 F1 B0..1 F2 F3 B2..3 F4 F5 B4..5 F6 F7 B6..7 F8 F9 B8..9
"""


def passes_of(schedule: Schedule, rank: int, batches: int) -> list[str]:
    actions = actions_of(schedule, rank, batches)
    return [str(a._replace(reads=None)).split("@")[0] for a in actions if a.op in (Op.F, Op.B)]


def test_the_figure_of_the_paper() -> None:
    schedule = make_schedule("v-timeprest", 3, 2)
    assert [" ".join(passes_of(schedule, rank, 5)) for rank in range(3)] == FIGURE.strip().splitlines()


def slots(p: int, n: int, batches: int) -> tuple[list[list[str]], int]:
    """What p stages do that run in each slot what they can, backwards first; and the largest version difference.

    That is one more than the updates of batches before that the first stage has not made where a backward begins.
    """
    forwards: list[dict[int, int]] = [{} for _ in range(p)]  # microbatch -> slot in which it has run
    backwards: list[dict[int, int]] = [{} for _ in range(p)]
    rows: list[list[str]] = [[] for _ in range(p)]
    never, v, slot = 10**9, 1, 0
    while len(backwards[0]) < batches:
        for s in range(p):
            t, k = len(backwards[s]), len(forwards[s])
            before = backwards[s + 1].get(t, never) if s + 1 < p else forwards[s].get(t * n + n - 1, never)
            if t < batches and before < slot:
                if s == p - 1:
                    v = max(v, t + 1 - sum(made < slot for made in backwards[0].values()))
                backwards[s][t] = slot
                rows[s].append(f"B{t * n}..{t * n + n - 1}" if n > 1 else f"B{t}")
            elif k < batches * n and (not s or forwards[s - 1].get(k, never) < slot):
                forwards[s][k] = slot
                rows[s].append(f"F{k}")
        slot += 1
    return rows, v


@pytest.mark.parametrize("p", range(1, 9))
def test_every_stage_does_what_it_can_and_backwards_go_first(p: int) -> None:
    for n in (1, 2, 3, 5, 8):
        rows, v = slots(p, n, 12)
        schedule = make_schedule("timeprest", p, n)
        assert [passes_of(schedule, rank, 12) for rank in range(p)] == rows
        assert version_difference(p, n) == v


@pytest.mark.parametrize("p", range(2, 9))
def test_where_all_stages_have_made_the_same_updates(p: int) -> None:
    """The paper's condition, p <= n + 1, and, wherever they say the same, its formula for v."""
    for n in range(2, 10):
        assert (version_difference(p, n) == 1) == (p <= n + 1) == ((p + n - 2) // n == 1)


@pytest.mark.parametrize("ahead", [2, 3, 5])
@pytest.mark.parametrize(("p", "n"), [(2, 2), (3, 2), (4, 3), (4, 4), (5, 2), (7, 2)])
def test_the_version_difference_in_a_simulated_run(p: int, n: int, ahead: int) -> None:
    """Forwards of one slot, backwards of one slot for a whole batch."""
    schedule = make_schedule("timeprest", p, n, options={"ahead": ahead})
    costs = Costs.uniform(schedule, 1.0, 0.5 / n, 0.5 / n)
    found = simulate_schedule(schedule, costs, 40).timeline.intervals
    made = sorted(i.end for i in found if i.what == "STEP" and i.stage == 0)
    begun = {i.batch: i.start for i in found if i.what == "B" and i.stage == p - 1}
    assert max(t + 1 - sum(end <= start for end in made) for t, start in begun.items()) == version_difference(
        p, n, ahead
    )


def test_further_ahead() -> None:
    """With n forwards more per rank it is 1F1B of whole batches: nobody waits, whatever a backward takes."""
    schedule = make_schedule("timeprest", 3, 4, options={"ahead": 4})
    plain = make_schedule("stash", 3, 1)
    for rank in range(3):
        wide = [
            name
            for a in actions_of(plain, rank, 5)
            for name in {
                Op.F: [f"F{4 * a.unit.first + k}" for k in range(4)],
                Op.B: [f"B{4 * a.unit.first}..{4 * a.unit.first + 3}"],
            }.get(a.op, [])
        ]
        assert passes_of(schedule, rank, 5) == wide
    bubbles = [
        steady_bubble(check(made).lowered, Costs.uniform(made), 12)
        for made in (make_schedule("timeprest", 3, 4, options={"ahead": ahead}) for ahead in (2, 3, 4))
    ]
    assert bubbles[0] > bubbles[1] > bubbles[2] == 0
    with pytest.raises(ScheduleError, match="set ahead to at least 2"):
        make_schedule("timeprest", 3, 4, options={"ahead": 1})
    with pytest.raises(ScheduleError, match=r"3 stages with ahead=4 need at least 6 microbatches"):
        make_schedule("v-timeprest", 3, 4, options={"ahead": 4})
    make_schedule("v-timeprest", 3, 6, options={"ahead": 4})


def test_the_newest_weights_everywhere_take_enough_microbatches() -> None:
    for p, n in product(range(1, 9), range(1, 9)):
        if p <= n + 1:
            make_schedule("v-timeprest", p, n)
            continue
        with pytest.raises(
            ScheduleError, match=rf"{p} stages and {n} microbatch(es)? .* raise microbatches to {p - 1}\b"
        ):
            make_schedule("v-timeprest", p, n)
    with pytest.raises(ScheduleError, match="with 3 stages and 1 microbatch per batch, .* has made the last update, "):
        make_schedule("v-timeprest", 3, 1)
    assert smallest_microbatches("v-timeprest", 8) == 7
    make_schedule("v-timeprest", 4, 1, order="endless-1f1b")  # a condition on nF1B


# Counted by hand: (p, n) -> per stage the mean delay of forwards, live versions, buffers and copies; activations.
BY_HAND = {
    # stage 0: F0 and F1 of batch t before the update of t-1, F2 and F3 after it
    ("v-timeprest", 2, 4): ([0.5, 0], [1, 1], [2, 2], [0, 0], [6, 4]),
    # stages 0, 1, 2: 6, 4 and 2 forwards ahead; of 3 microbatches 3 read t-2, 3 read t-2 or t-1, ...
    ("v-timeprest", 4, 3): ([2, 4 / 3, 2 / 3, 0], [1] * 4, [2] * 4, [0] * 4, [9, 7, 5, 3]),
    # all stages read what stage 0 reads; versions that forwards to come read stay, the gradient takes turns with them
    ("timeprest", 2, 4): ([0.5, 0.5], [1, 2], [2, 2], [0, 0], [6, 4]),
    ("timeprest", 4, 3): ([2] * 4, [1, 2, 3, 3], [2, 2, 3, 3], [0] * 4, [9, 7, 5, 3]),
    # the version of each forward stays until its backward
    ("i-timeprest", 2, 4): ([0.5, 0], [2, 1], [3, 2], [1, 1], [6, 4]),
    ("i-timeprest", 4, 3): ([2, 4 / 3, 2 / 3, 0], [3, 3, 2, 1], [4, 4, 3, 2], [1] * 4, [9, 7, 5, 3]),
}


@pytest.mark.parametrize(("method", "p", "n"), BY_HAND)
def test_what_is_derived(method: str, p: int, n: int) -> None:
    proof = prove(method, p, n)
    stages = [proof.stages[stage] for stage in proof.schedule.stages]
    delays, versions, buffers, copies, activations = BY_HAND[method, p, n]
    assert [float(facts.delay.forward) for facts in stages] == pytest.approx(delays)
    assert [facts.versions for facts in stages] == versions
    assert [facts.buffers for facts in stages] == buffers
    assert [facts.copies for facts in stages] == copies
    assert list(proof.activations) == activations
    if method != "i-timeprest":
        assert {facts.delay.backward for facts in stages} == {0}  # a backward starts from all that its batch allows


@pytest.mark.parametrize("method", METHODS)
def test_the_text_form(method: str) -> None:
    for p, n in ((1, 1), (2, 3), (3, 2), (4, 4)):
        schedule = make_schedule(method, p, n)
        assert parse_schedule(str(schedule)) == schedule
        check(parse_schedule(str(schedule)))


READS = """
F0^t-2 F1^t-2 PREDICT-8^t-4,t-2~i-8 B-8..-7^t-4,t-2~i-8 PREDICT-6^t-3,t-2~i-6 B-6..-5^t-3,t-2~i-6 STEP[t-2] F2^t-1
F0^t-1 F1^t-1 F2^t-1 F3^t-1 PREDICT-4^t-2,t-1~i-4 B-4..-1^t-2,t-1~i-4 STEP[t-1]
F0^t-1 F1^t-1 PREDICT-4^t-2,t-1~i-4 B-4..-3^t-2,t-1~i-4 PREDICT-2^t-1,t-1~i-2 B-2..-1^t-1,t-1~i-2 STEP[t-1] F2^t F3^t
F0^t F1^t F2^t F3^t PREDICT0^t,t~i0 B0..3^t,t~i0 STEP[t]
"""


def test_blends_are_of_what_each_forward_read() -> None:
    """Microbatches of a batch that read different versions have backwards of their own; in the drain, too."""
    rows = str(make_schedule("i-timeprest", 4, 4)).splitlines()
    for rank, row in enumerate(READS.strip().splitlines()):
        assert f"rank {rank}: {row}" in rows[4 + rank]
    assert rows[8].startswith("drain 0: PREDICT-8^t-4,t-2~i-8 B-8..-7^t-4,t-2~i-8 PREDICT-6^t-3,t-2~i-6")
    ends = "PREDICT-4^t-3,t-1~i-4 B-4..-3^t-3,t-1~i-4 PREDICT-2^t-2,t-1~i-2 B-2..-1^t-2,t-1~i-2 STEP[t-1]"
    assert rows[8].endswith(ends)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("B-4..-3^t-2,t-1~i-4", "B-4..-3^t-1,t-1~i-4", "blends version t-1, but the forward of microbatch -4"),
        ("~i-4", "~i-3", "reads copy i-3, which was made for another microbatch"),
        ("PREDICT-2^t-1,t-1~i-2 ", "", "reads copy i-2, which no PREDICT has made"),
        ("PREDICT-4^t-2,t-1~i-4 B-4..-3^t-2,t-1~i-4 PREDICT-2^t-1,t-1~i-2 B-2..-1^t-1,t-1~i-2",
         "PREDICT-4^t-2,t-1~i-4 B-4..-1^t-2,t-1~i-4", "blends version t-2, but the forward of microbatch -2"),
        ("PREDICT-4^t-2,t-1~i-4", "PREDICT-4^t-2,t-2~i-4", "must be made of version"),
    ],
)  # fmt: skip
def test_a_blend_of_other_versions_is_refused(old: str, new: str, message: str) -> None:
    text = str(make_schedule("i-timeprest", 2, 4))
    assert old in text
    with pytest.raises(ScheduleError, match=message):
        check(parse_schedule(text.replace(old, new)))


def test_stashing_divides_backwards_as_well() -> None:
    """The paper's variant with horizontal weight stashing."""
    rows = str(make_schedule("stash", 2, 4, order="nf1b")).splitlines()
    assert rows[4] == "rank 0: F0^t-1 F1^t-1 B-4..-3^t-2 B-2..-1^t-1 STEP[t-1] F2^t F3^t"


@pytest.mark.parametrize(("method", "messages"), [("v-timeprest", 3 * (4 + 1)), ("i-timeprest", 3 * 4 + 1 + 2 + 1)])
def test_a_message_for_each_backward(method: str, messages: int) -> None:
    lowered = lower(make_schedule(method, 4, 4))
    sends = [i for program in lowered.programs for i in program.period if i.action.op is Op.SEND]
    assert len(sends) == messages


def test_what_cannot_be_blended() -> None:
    with pytest.raises(ScheduleError, match="a backward on a blend of two versions must be a full backward"):
        make_schedule("i-timeprest", 2, 4, order="zb-h1")
    with pytest.raises(ConfigError, match="needs version rule blended, not 'newest'"):
        make_schedule("i-timeprest", 2, 4, rule="newest")
    wide = "schedule wide\nrule flush\nmicrobatches 2\nnodes 0@0\nrank 0: F0..1^t B0..1^t STEP[t]\n"
    with pytest.raises(CapabilityError, match="wide: the runtime offers passes of one training microbatch"):
        check_offered(parse_schedule(wide))
