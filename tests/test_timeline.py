"""The one definition of bubble, on timelines small enough to count by hand."""

import pytest

from penstock.timeline import Interval, Timeline


def timeline(*rows, ranks=2):
    return Timeline(ranks, [Interval(rank, "compute", start, end, what, what) for rank, start, end, what in rows])


def test_the_four_figures():
    """Rank 0 works 4 of 0..10, rank 1 works 6 of 2..9: makespan 10, longest span 10, ideal 6."""
    bubble = timeline((0, 0, 2, "F"), (0, 8, 10, "B"), (1, 2, 6, "F"), (1, 7, 9, "B")).bubble()
    assert (bubble.makespan, bubble.rank_span, bubble.ideal, bubble.busy) == (10, 10, 6, (4, 6))
    assert bubble.bubble == pytest.approx(10 / 20)
    assert bubble.bubble_of_ideal == pytest.approx(4 / 6)
    assert bubble.rank_span_bubble == pytest.approx(0.4)


def test_spans_are_per_rank_and_the_makespan_is_not():
    bubble = timeline((0, 0, 4, "F"), (1, 4, 9, "F")).bubble()
    assert (bubble.makespan, bubble.rank_span, bubble.ideal) == (9, 5, 5)
    assert bubble.rank_span_bubble == 0
    assert bubble.bubble == pytest.approx(0.5)


def test_time_counts_from_the_first_work():
    """A measured timeline does not begin at 0."""
    early, late = timeline((0, 0, 2, "F"), (1, 2, 5, "B")), timeline((0, 100, 102, "F"), (1, 102, 105, "B"))
    assert (late.start, late.makespan) == (100, 5)
    assert late.bubble() == early.bubble()


@pytest.mark.parametrize("what", ["wait", "REDUCE", "AVERAGE", "GATHER", "OFFLOAD", "FETCH", "SEND", "RECV"])
def test_waiting_and_moving_data_is_no_work(what):
    quiet = timeline((0, 0, 2, "F"), (1, 0, 2, "F"))
    noisy = timeline((0, 0, 2, "F"), (1, 0, 2, "F"))
    noisy.intervals.append(Interval(1, "compute" if what == "wait" else "another", 2, 50, what, what))
    assert noisy.bubble() == quiet.bubble()
    assert len(noisy.work()) == 2


@pytest.mark.parametrize("what", ["F", "B", "I", "W", "R", "STEP", "PREDICT", "FUSED"])
def test_passes_and_updates_are_work(what):
    assert timeline((0, 0, 3, what), ranks=1).bubble().busy == (3,)


def test_a_rank_without_work_is_idle_all_the_time():
    bubble = timeline((0, 0, 4, "F"), ranks=2).bubble()
    assert bubble.busy == (4, 0)
    assert bubble.bubble == pytest.approx(0.5)


def test_an_empty_timeline_has_no_bubble():
    bubble = Timeline(2).bubble()
    assert (bubble.makespan, bubble.rank_span, bubble.ideal) == (0, 0, 0)
    assert (bubble.bubble, bubble.bubble_of_ideal, bubble.rank_span_bubble) == (0, 0, 0)


def test_work_of_one_rank():
    both = timeline((0, 0, 2, "F"), (1, 2, 4, "F"), (1, 4, 5, "wait"))
    assert [i.start for i in both.work()] == [0, 2]
    assert [i.start for i in both.work(1)] == [2]


def test_peak_memory_per_kind():
    filled = Timeline(2, memory={(0, "activations"): [(0, 1), (1, 3), (2, 2)], (1, "weights"): [(0, 7)]})
    assert filled.peak("activations") == [3, 0]
    assert filled.peak("weights") == [0, 7]
