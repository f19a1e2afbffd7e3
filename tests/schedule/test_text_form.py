"""The text form: what is printed is read back as the same schedule; what cannot be read is refused with its place."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.ir.absolute_actions import actions_of
from penstock.schedule.ir.schedule import (
    Action,
    Copy,
    Edge,
    Kind,
    Op,
    Payload,
    Program,
    Schedule,
    Stage,
    Unit,
    WeightRef,
    format_action,
    format_schedule,
    straight,
)
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_action, parse_schedule
from support.examples import examples
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))


@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (3, 2), (4, 5), (5, 4)])
def test_what_a_method_prints_is_read_back(method, stages, microbatches):
    schedule = make_schedule(method, stages, max(microbatches, least(method, stages)))
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_what_a_golden_file_holds_is_printed_and_read_back(path):
    schedule = parse_schedule(path.read_text(), path.name)
    assert parse_schedule(format_schedule(schedule)) == schedule


def without_comments(text):
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_file_is_printed_as_it_was_written(path):
    text = path.read_text()
    assert without_comments(format_schedule(parse_schedule(text))) == without_comments(text)


def test_one_schedule_by_hand_from_both_sides():
    """Every field of the text form, spelt out as values."""
    text = (
        "schedule everything\n"
        "rule predicted\n"
        "microbatches 4\n"
        "nodes 0@0 1@1 0.1@1\n"
        "edges 0|1\n"
        "frozen 1\n"
        "segments 0,1\n"
        "rank 0: F0..1^t-1,t~p-3 R2:1/3 AVERAGE[t-1]%4 Fe3\n"
        "rank 1: [F3@1^t+B-1@0.1^t-2] STEP[t-2]@0.1\n"
        "drain 1: B-2@1 VALIDATE[t-1]@1\n"
    )
    first, second, up = Stage(0, 0, 0), Stage(1, 0, 1), Stage(0, 1, 1)
    pair = (
        Action(Op.F, second, Unit(3), WeightRef((0,))),
        Action(Op.B, up, Unit(-1), WeightRef((-2,))),
    )
    schedule = Schedule(
        name="everything",
        microbatches=4,
        stages=(first, second, up),
        edges=(Edge(0, 1, backward=False),),
        programs=(
            Program(
                (
                    Action(Op.F, first, Unit(0, 2), WeightRef((-1, 0), Copy("p", -3))),
                    Action(Op.R, first, Unit(2, 1, (1, 3))),
                    Action(Op.AVERAGE, first, Unit(-1, kind=Kind.BATCH, every=4)),
                    Action(Op.F, first, Unit(3, kind=Kind.EVAL)),
                )
            ),
            Program(
                (
                    Action(Op.FUSED, second, Unit(3), parts=pair),
                    Action(Op.STEP, up, Unit(-2, kind=Kind.BATCH)),
                ),
                (Action(Op.B, second, Unit(-2)), Action(Op.VALIDATE, second, Unit(-1, kind=Kind.BATCH))),
            ),
        ),
        rule="predicted",
        frozen=frozenset({1}),
        segments=((0, 1),),
    )
    assert parse_schedule(text) == schedule
    assert format_schedule(schedule) == text


NODES = (Stage(0, 0, 0), Stage(1, 0, 0), Stage(1, 2, 0))
versions = st.lists(st.integers(-9, 9), min_size=1, max_size=3).map(tuple)
copies = st.none() | st.builds(Copy, st.text("abcxyz", min_size=1, max_size=3), st.integers(-9, 9))
reads = st.none() | st.builds(WeightRef, versions, copies)
slices = st.none() | st.integers(1, 4).flatmap(lambda k: st.tuples(st.integers(0, k - 1), st.just(k)))
units = st.builds(
    lambda first, count, piece, kind: Unit(first, count, piece, kind),
    st.integers(-9, 9),
    st.integers(1, 4),
    slices,
    st.sampled_from([Kind.TRAIN, Kind.EVAL]),
)
batch_units = st.builds(
    lambda first, every: Unit(first, kind=Kind.BATCH, every=every), st.integers(-9, 0), st.integers(1, 5)
)
plain = st.builds(
    lambda op, stage, unit, reads: Action(op, stage, unit, reads),
    st.sampled_from([op for op in Op if op is not Op.FUSED]),
    st.sampled_from(NODES),
    units | batch_units,
    reads,
)
messages = st.builds(
    lambda op, unit, peer, payload: Action(op, NODES[1], unit, None, (), peer, payload),
    st.sampled_from([Op.SEND, Op.RECV]),
    units,
    st.sampled_from(NODES),
    st.sampled_from(Payload),
)
fused = st.lists(plain, min_size=2, max_size=3).map(
    lambda parts: Action(Op.FUSED, parts[0].stage, parts[0].unit, parts=tuple(parts))
)


@settings(max_examples=examples(300), derandomize=True, deadline=None, database=None)
@given(plain | messages | fused)
def test_every_action_is_read_back(action):
    assert parse_action(format_action(action, relative=True), NODES, 0) == action


def test_str_of_an_action_has_absolute_numbers():
    schedule = make_schedule("2bw", 2, 2)
    printed = [str(a) for a in actions_of(schedule, 0, 2)]
    assert printed == [
        "F0@0^0", "F1@0^0", "B0@0^0", "F2@0^0", "B1@0^0", "F3@0^0", "B2@0^0", "STEP[0]@0", "B3@0^0", "STEP[1]@0",
    ]  # fmt: skip


def test_a_schedule_without_edges_is_read_back():
    """Stages that exchange nothing are no chain."""
    stage, other = straight(2)
    row = [Action(op, stage, Unit(0), WeightRef((0,))) for op in (Op.F, Op.B)]
    row.append(Action(Op.STEP, stage, Unit(0, kind=Kind.BATCH)))
    programs = (Program(tuple(row)), Program(tuple(a._replace(stage=other) for a in row)))
    schedule = Schedule("apart", 1, (stage, other), (), programs, "flush")
    assert parse_schedule(str(schedule)) == schedule


# --- completion by the rule ------------------------------------------------------------------------------------------


def bare(schedule):
    """The text of a schedule without versions and updates."""
    tokens = (token.split("^")[0] for token in str(schedule).replace("\n", " \n ").split(" "))
    lines = " ".join(token for token in tokens if not token.startswith("STEP")).split("\n")
    return "\n".join(line for line in lines if line.strip() and not line.strip().endswith(":"))


@pytest.mark.parametrize("method", CHAINS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 4)])
def test_a_file_without_versions_is_completed_by_its_rule(method, stages, microbatches):
    schedule = make_schedule(method, stages, max(microbatches, least(method, stages)))
    assert "STEP" not in bare(schedule)
    assert "^" not in bare(schedule)
    assert parse_schedule(bare(schedule)) == schedule


def test_the_rule_is_flush_unless_told_otherwise():
    schedule = parse_schedule("microbatches 2\nnodes 0@0\nrank 0: F0 F1 B0 B1\n")
    assert str(schedule).splitlines()[-1] == "rank 0: F0^t F1^t B0^t B1^t STEP[t]"
    assert schedule.name == "unnamed"


def test_completion_inserts_a_reduce_where_nodes_share_a_cut():
    text = (
        "microbatches 2\nnodes 0@0 1@1 0.1@1 1.1@0\nrank 0: F0@0 F1@1.1 B1@1.1 B0@0\nrank 1: F1@0.1 F0@1 B0@1 B1@0.1\n"
    )
    schedule = parse_schedule(text)
    for rank, stages in ((0, ("0", "1.1")), (1, ("1", "0.1"))):
        actions = str(schedule).splitlines()[-2 + rank].split()
        assert all(actions.index(f"REDUCE[t]@{stage}") < actions.index(f"STEP[t]@{stage}") for stage in stages)
    check(schedule)


def test_completion_of_chimera_is_legal():
    """Both ranks of a pair must join the reductions of their two stages in one order."""
    schedule = parse_schedule((GOLDEN[0].parent / "chimera.txt").read_text())
    text = " ".join(t for t in bare(schedule).replace("\n", " \n ").split(" ") if not t.startswith("REDUCE"))
    check(parse_schedule(text))


def test_completion_keeps_frozen_cuts():
    text = (
        "microbatches 2\nnodes 0@0 1@1\nedges 0|1\nfrozen 0\n"
        "rank 0: F0 F1\nrank 1: F0 B0 F1 B1\n"
    )  # fmt: skip
    schedule = parse_schedule(text)
    assert schedule.frozen == {0}
    assert str(schedule).splitlines()[-2:] == ["rank 0: F0 F1", "rank 1: F0^t B0^t F1^t B1^t STEP[t]"]
    check(schedule)


def test_completion_keeps_segments():
    """Without the segment rank 1 would recompute from an input that it does not keep."""
    text = (
        "rule newest\nmicrobatches 1\nnodes 0@0 1@1\nsegments 0,1\n"
        "rank 0: F0 R0 B0\nrank 1: F0 R0 B0\n"
    )  # fmt: skip
    assert parse_schedule(text).segments == ((0, 1),)


# --- what cannot be read ---------------------------------------------------------------------------------------------

GOOD = """schedule s
rule flush
microbatches 2
nodes 0@0 1@1
rank 0: F0^t F1^t B0^t B1^t STEP[t]
rank 1: F0^t B0^t F1^t B1^t STEP[t]
"""


def message_of(text):
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text, "file.txt")
    return str(caught.value)


@pytest.mark.parametrize(
    "token",
    ["F", "f0", "F0^", "F0^v", "F0^t-", "F0^0", "F0^t~", "F0~p0", "X0", "F0@", "F0 ^t", "FUSED0", "STEP[5]", "STEP[t",
     "F0:1", "F0..", "F+0", "[F0^t]", "[F0^t+x]", "STEP[t]%", "F0^t,", "F1.0", "F0@0>1", "0F3"],
)  # fmt: skip
def test_a_token_that_cannot_be_read_is_named_with_its_line(token):
    message = message_of(GOOD.replace("rank 1: F0^t B0^t", f"rank 1: F0^t {token} B0^t"))
    assert message.startswith("file.txt:6: ")
    assert token.split()[-1].strip("[]") in message


@pytest.mark.parametrize(
    ("token", "telling"),
    [
        ("F0@7", "no such stage here; stages: 1"),
        ("F0@0", "no such stage here; stages: 1"),  # rank 0's
        ("F0@1.1", "no such stage here; stages: 1"),
        ("F1..0", "a range must be ascending"),
        ("F0:2/2", "slice j of k must have j < k"),
        ("[F0^t]", "needs at least two passes"),
        ("SEND0@1>5/gradient", "no such stage here; stages: 0, 1"),
    ],
)
def test_a_token_without_meaning_says_what_is_expected(token, telling):
    message = message_of(GOOD.replace("rank 1: F0^t", f"rank 1: {token}"))
    assert message.startswith("file.txt:6: ")
    assert telling in message


def test_a_payload_that_does_not_exist_is_named():
    message = message_of(GOOD.replace("rank 1: F0^t", "rank 1: F0^t SEND0@1>0/parcel"))
    assert message.startswith("file.txt:6: ")
    assert "parcel" in message


def test_a_rank_with_several_nodes_must_say_which():
    message = message_of("microbatches 1\nnodes 0@0 1@0\nrank 0: F0 F0@1\n")
    assert message.startswith("file.txt:3: ")
    assert "add the stage, @STAGE; stages: 0, 1" in message


@pytest.mark.parametrize(
    ("old", "new", "telling"),
    [
        ("nodes 0@0 1@1\n", "", "the line 'nodes ...' is missing"),
        ("microbatches 2\n", "", "the line 'microbatches ...' is missing"),
        ("microbatches 2", "microbatches two", "expected a number, got 'two'"),
        ("microbatches 2", "microbatches -2", "expected a number, got '-2'"),
        ("nodes 0@0 1@1", "nodes 0@0 1", "cannot read stage '1'"),
        ("nodes 0@0 1@1", "nodes 0@0 1@1\nedges 0-1", "cannot read edge '0-1'"),
        ("nodes 0@0 1@1", "nodes 0@0 1@1\nfrozen x", "expected a number, got 'x'"),
        ("nodes 0@0 1@1", "nodes 0@0 1@1\nsegments 0,b", "expected a number, got 'b'"),
        ("rule flush", "rule fresh", "unknown rule 'fresh'; known: flush"),
        ("schedule s", "shedule s", ":1: unknown line 'shedule'"),
        ("rank 1:", "rank x:", ":6: unknown line 'rank'"),
        ("rank 1:", "rank 0:", ":6: 'rank 0' appears twice"),
        ("rank 1:", "drain 1:", "missing [1]"),
        ("rank 1:", "rank 3:", "missing [1], unknown [3]"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(old, new, telling):
    assert old in GOOD
    message = message_of(GOOD.replace(old, new))
    assert message.startswith("file.txt")
    assert telling in message


def test_a_line_given_twice_is_refused():
    """The second would silently win."""
    assert "microbatches" in message_of(GOOD.replace("microbatches 2\n", "microbatches 2\nmicrobatches 4\n"))


def test_a_batch_without_microbatches_is_refused():
    for text in (
        "microbatches 0\nnodes 0@0\nrank 0: F0 B0\n",
        "microbatches 0\nnodes 0@0\nrank 0: F0^t B0^t STEP[t]\n",
    ):
        with pytest.raises(ScheduleError, match="at least 1 microbatch"):
            check(parse_schedule(text))


def test_every_zeroth_batch_is_refused():
    """`every` counts from 1; the 0 would be lost in print."""
    assert "%0" in message_of(GOOD.replace("STEP[t]\nrank 1", "STEP[t] AVERAGE[t]%0\nrank 1"))


def test_a_rule_that_blends_versions_completes_an_order():
    made = parse_schedule("rule blended\nmicrobatches 2\nnodes 0@0\nrank 0: F0 F1 B0..1\n")
    assert "rank 0: F0^t F1^t PREDICT0^t,t~i0 B0..1^t,t~i0 STEP[t]\n" in str(made)


@pytest.mark.parametrize("passes", ["F0 I0 W0", "F0 F1 B0 [F2+B1] B2"])
def test_blends_are_for_whole_backwards(passes):
    m = passes.count("F")
    with pytest.raises(ScheduleError, match="a backward on a blend of two versions must be a full backward"):
        parse_schedule(f"rule blended\nmicrobatches {m}\nnodes 0@0\nrank 0: {passes}\n")


def test_comments_and_blank_lines_mean_nothing():
    noisy = "# a title\n\n" + GOOD.replace("\n", "   # why\n\n")
    assert parse_schedule(noisy) == parse_schedule(GOOD)


def test_schedules_compare_by_value():
    schedule = parse_schedule(GOOD)
    assert schedule == parse_schedule(GOOD)
    assert schedule != replace(schedule, name="other")
