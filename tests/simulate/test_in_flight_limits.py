"""What keeps `in_flight="auto"` below what links ask for: batches, memory, groups. What would do is said, at once."""

from __future__ import annotations

import re

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.in_flight_choice import InFlightChoice, with_in_flight
from penstock.schedule.ir.version_rules import RULES
from penstock.simulate import auto_in_flight
from penstock.simulate.auto_in_flight import choose_in_flight
from penstock.simulate.costs import Costs, StageCost


def chosen(method: str, ranks: int, m: int, latency: float, most: int | None = None, **options: object) -> object:
    """The choice for equal ranks, each with memory for so many."""
    asks = ScheduleRequest(method, ranks, m, options={"in_flight": "auto", **options})
    costs = Costs((StageCost(1, 1, 1),) * ranks, latency)
    return choose_in_flight(asks, costs, None if most is None else (most,) * ranks)[1]


def enough(choice: object) -> int:
    """The microbatches of a batch that would do, as the choice says."""
    found = re.search(r"would be enough(?: for that)? \(--microbatches (\d+), or microbatches=\1\)", str(choice))
    assert found is not None, choice
    return int(found[1])


@pytest.mark.parametrize("method", ["2bw", "3bw", "1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("latency", [10, 1000, 1e9])
def test_a_batch_that_would_do_is_named_however_long_messages_take(method, ranks, latency):
    few = chosen(method, ranks, ranks, latency)
    assert f"but a batch has {ranks} microbatches, where " in str(few)
    m = enough(few)
    if method not in ("zb-h1", "zb-h2"):  # what these hold would be proven, which takes long with so many
        assert chosen(method, ranks, m, latency).reasons == ()
        assert chosen(method, ranks, m, latency).taken == few.asked
        assert enough(chosen(method, ranks, m - 1, latency)) == m


@pytest.mark.parametrize(("rule", "method"), [("double-buffer", "2bw"), ("triple-buffer", "3bw")])
@pytest.mark.parametrize("numbers", [(2, 1), (3, 1), (4, 4), (5, 2), (6, 3, 1), (7, 7, 2), (8, 1, 1)])
def test_as_many_in_flight_as_a_version_rule_allows_are_proven_and_one_more_is_not(rule, method, numbers):
    least = RULES[rule].least_microbatches(numbers[0])
    assert RULES[rule].most_in_flight(least) >= numbers[0]
    prove(method, len(numbers), least, options={"in_flight": numbers})
    if least > 1:
        assert RULES[rule].most_in_flight(least - 1) < numbers[0]
        with pytest.raises(ScheduleError, match=f"needs at least {least} microbatches per batch, got {least - 1}"):
            prove(method, len(numbers), least - 1, options={"in_flight": numbers})


def test_numbers_of_ones_own_that_batches_are_much_too_small_for_are_told_which_would_do():
    with pytest.raises(ScheduleError, match="needs at least 39 microbatches per batch, got 4; raise .* to 39"):
        prove("2bw", 2, 4, options={"in_flight": 40})


@pytest.mark.parametrize("method", ["2bw", "3bw", "1f1b", "zb-h1", "zb-h2", "stash", "newest", "spectrain"])
@pytest.mark.parametrize("what", ["auto", "auto+delay"])
@pytest.mark.parametrize("most", [None, 10**12])
def test_nothing_is_proven_that_batches_do_not_allow(method, what, most, monkeypatch):
    ranks, m = 3, 2

    def bounded(request: ScheduleRequest, numbers: tuple[int, ...]) -> ScheduleRequest:
        assert max(numbers) <= ranks + 2 * m
        return with_in_flight(request, numbers)

    monkeypatch.setattr(auto_in_flight, "with_in_flight", bounded)
    assert max(chosen(method, ranks, m, 1e9, most, in_flight=what).taken) <= ranks + 2 * m


LIMITED = [
    ("2bw", 9, 10, (10, 7, 4, 1), "but memory allows 10/10/10/10; "),
    (
        "2bw",
        4,
        10,
        (5, 4, 2, 1),
        "but memory allows 10/10/10/10 and a batch has 4 microbatches, where 9 would be",
    ),
    ("2bw", 4, 5, (5, 4, 2, 1), "but memory allows 5/5/5/5; "),
    ("2bw", 4, 99, (5, 4, 2, 1), "but a batch has 4 microbatches, where 24 would be enough (--microbatches 24"),
    ("1f1b", 9, 4, (4, 3, 2, 1), "but memory allows 4/4/4/4; "),
    ("1f1b", 3, 4, (3, 3, 3, 1), "but memory allows 4/4/4/4 and a batch has 3 microbatches, where 4 would be enough"),
    ("zb-h1", 6, 4, (4, 3, 2, 1), "but memory allows 4/4/4/4 of the 6/6/6/6 that are held with them; "),
    ("zb-h1", 3, 4, (3, 3, 3, 1), "but memory allows 4/4/4/4 and a batch has 3 microbatches, where 4 would be enough"),
    ("zb-h1", 3, 99, (3, 3, 3, 1), "but a batch has 3 microbatches, where 25 would be enough (--microbatches 25"),
]


@pytest.mark.parametrize(("method", "m", "most", "taken", "said"), LIMITED)
def test_of_memory_and_batch_that_is_said_which_holds_the_number_down(method, m, most, taken, said):
    choice = chosen(method, 4, m, 10, most)
    assert choice.taken == taken
    assert said in str(choice)
    assert (" for that (" in str(choice)) == ("memory" in said and "where" in said)
    if " and a batch has" in said:  # with that many, memory alone does
        assert "a batch has" not in str(chosen(method, 4, enough(choice), 10, most))


def test_links_that_ask_for_no_more_than_the_order_has_are_no_reason_for_larger_batches():
    assert chosen("1f1b", 4, 2, 0).reasons == ()
    assert chosen("zb-v", 4, 2, 0).reasons == ()


@pytest.mark.parametrize("method", ["zb-v", "zb-interleaved"])
def test_a_batch_all_of_which_is_in_flight_on_ranks_of_chunks_is_called_too_small(method):
    few = chosen(method, 2, 2, 1)
    assert "but a batch has 2 microbatches, where " in str(few)
    assert chosen(method, 2, enough(few), 1).reasons == ()
    tight = "but memory allows 3/3 and a batch has 2 microbatches, where 3 would be enough for that"
    assert tight in str(chosen(method, 2, 2, 1, 3))


def test_one_short_pass_does_not_make_links_ask_for_much_more():
    """As of measured stages: a message of the time of a rank's whole work takes as long as six passes of its chunks."""
    asks = ScheduleRequest("zb-v", 2, 2, options={"in_flight": "auto"})
    for times in ((1, 1, 1), (1.5, 0.01, 1.49)):
        assert enough(choose_in_flight(asks, Costs((StageCost(*times),) * 2, 3.0))[1]) == 8


@pytest.mark.parametrize("method", ["interleaved", "zb-interleaved"])
def test_a_group_that_is_given_is_said_to_be_why_links_get_less_than_they_ask_for(method):
    given, free = chosen(method, 2, 4, 1, group=2), chosen(method, 2, 4, 1)
    assert isinstance(given, InFlightChoice)
    assert isinstance(free, InFlightChoice)
    assert given.taken < free.taken
    assert given.asked > given.taken
    assert f"but a group has 2 microbatches (group=2 is given) where {free.group} would do" in str(given)
    assert "given" not in str(chosen(method, 2, 4, 1, group=free.group))
