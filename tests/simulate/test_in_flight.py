"""The microbatches in flight that links ask for: no bubble, and no number less without one."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, pairwise

import pytest

import penstock
from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.ir.in_flight_option import check_in_flight, in_flight_on, read_in_flight, write_in_flight
from penstock.schedule.methods import choice as choices
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ASK_LINKS, ORDERS
from penstock.schedule.orders.without_auto import WITHOUT_AUTO
from penstock.simulate.auto_in_flight import as_allowed, choose_in_flight
from penstock.simulate.auto_of_chunks import choose_interleaved
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.least_in_flight import least_in_flight, rank_times
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.simulate import simulate_schedule
from support.schedules import make_schedule

EQUAL = Costs((StageCost(1, 1, 1),) * 4)


def long_run(method: str, numbers: tuple[int, ...], m: int, costs: Costs) -> float:
    """The bubble of one more batch in a long span."""
    proof = prove(method, len(numbers), m, options={"in_flight": numbers})
    lowered = simulate_schedule(proof, costs, 1).lowered
    return steady_bubble(lowered, costs, proof.steady_from + 8)


def unavoidable(costs: Costs) -> float:
    """The bubble of ranks that wait for nothing but the slowest one, or for the lane of a message."""
    work = [s.forward + s.backward_input + s.backward_weight for s in costs.stages]
    return 1 - sum(work) / (len(work) * max(*work, costs.transfer))


def drawn_costs(seed: int) -> Costs:
    """Stages of different times, and a link."""
    draw = random.Random(seed)
    stages = []
    for _ in range(draw.choice((2, 3, 4, 5))):
        forward = draw.choice((0.7, 1.0, 1.3, 2.0))
        stages.append(StageCost(forward, forward * draw.choice((0.8, 1.0, 1.2)), forward))
    latency = draw.choice((0.05, 0.3, 1.0, 2.7, 3.3)) * draw.random()
    return Costs(tuple(stages), latency, draw.choice((0.0, 0.0, 1.0, 3.0, 7.0)))


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_waits_for_messages_and_one_less_anywhere_makes_it_wait(seed):
    costs, m = drawn_costs(seed), 40
    found = least_in_flight(rank_times(costs, splits=False), costs.latency + costs.transfer, costs.transfer)
    assert long_run("2bw", found, m, costs) == pytest.approx(unavoidable(costs), abs=1e-9)
    for rank, number in enumerate(found):
        less = (*found[:rank], number - 1, *found[rank + 1 :])
        if number == 1 or (rank + 1 < len(found) and found[rank + 1] > number - 1):
            continue  # no order
        assert long_run("2bw", less, m, costs) > unavoidable(costs) + 1e-4


@pytest.mark.parametrize("latency", [0.1, 0.75, 1.5, 2.5])
def test_a_flushed_batch_takes_no_longer_for_latencies_between_filling_and_draining(latency):
    costs = Costs(EQUAL.stages, latency)
    for method, splits in (("1f1b", False), ("zb-h1", True)):
        found = least_in_flight(rank_times(costs, splits=splits), latency)
        ends = [
            simulate_schedule(prove(method, 4, m, options={"in_flight": found}), costs).bubble.makespan
            for m in (24, 48)
        ]
        assert ends[1] - ends[0] == pytest.approx(24 * 3)  # F + B of each more microbatch, and nothing else
        plain = [simulate_schedule(prove(method, 4, m), costs).bubble.makespan for m in (24, 48)]
        assert plain[1] - plain[0] > 24 * 3 or found == (4, 3, 2, 1)


@pytest.mark.parametrize(("latency", "more"), [(0.0, 0), (0.1, 1), (1.5, 1), (1.6, 2), (3.0, 2)])
def test_equal_ranks_need_a_whole_number_more_for_every_hop(latency, more):
    found = least_in_flight(rank_times(EQUAL, splits=False), latency)
    assert found == tuple(1 + (3 - rank) * (1 + more) for rank in range(4))


def test_a_number_for_the_first_rank_goes_down_to_the_last():
    assert in_flight_on(4, 4) == [4, 3, 2, 1]
    assert in_flight_on(4, 7) == [7, 5, 3, 1]
    assert in_flight_on(4, 5) == [5, 4, 3, 1]
    assert in_flight_on(4, 2) == [2, 2, 2, 1]
    assert in_flight_on(1, 1) == [1]


@pytest.mark.parametrize("method", ["2bw", "1f1b", "zb-h1", "stash"])
@pytest.mark.parametrize("numbers", [(2, 2, 1), (3, 3, 1), (5, 3, 2), (4, 4, 4)])
def test_any_numbers_that_do_not_rise_are_proven_and_held(method, numbers):
    proof = prove(method, 3, 6, options={"in_flight": numbers})
    held = [int(a) for a in proof.activations]
    assert held == list(numbers) if method != "zb-h1" else max(held) <= max(numbers) + 1


def test_the_named_orders_are_numbers_in_flight():
    def programs(*what: object, **options: object) -> object:
        return make_schedule(*what, **options).programs  # type: ignore[arg-type]

    assert programs("eager", 4, 8) == programs("1f1b", 4, 8, options={"in_flight": 7})
    assert programs("2bw-eager", 4, 8) == programs("2bw", 4, 8, options={"in_flight": 7})
    assert programs("zb-h2", 4, 8) == programs("zb-h1", 4, 8, options={"in_flight": 7})
    assert programs("2bw", 4, 8) == programs("2bw", 4, 8, options={"in_flight": "auto"})  # messages take no time


def chosen(method: str, m: int, what: str = "auto", **more: object) -> object:
    costs = Costs(EQUAL.stages, 0.75)
    return choose_in_flight(ScheduleRequest(method, 4, m, options={"in_flight": what}), costs, **more)  # type: ignore[arg-type]


def test_auto_takes_what_the_links_ask_for():
    request, choice = chosen("2bw", 8)
    assert choice.taken == choice.asked == (7, 5, 3, 1)
    assert request.options["in_flight"] == (7, 5, 3, 1)
    assert str(choice) == "7/5/3/1 microbatches on ranks 0 to 3 (4/3/2/1 where messages take no time)"


def test_auto_keeps_to_two_versions_and_says_which_batch_would_do():
    request, choice = chosen("2bw", 3)
    assert choice.taken == (4, 3, 2, 1)
    assert "a batch has 3 microbatches, where 6 would be enough (--microbatches 6, or microbatches=6)" in str(choice)
    assert max(facts.versions for facts in request.prove().stages.values()) == 2
    chosen("2bw", 6)[0].prove()
    with pytest.raises(ScheduleError, match="needs at least 6"):
        prove("2bw", 4, 5, options={"in_flight": (7, 5, 3, 1)})


def test_auto_keeps_to_memory():
    assert chosen("2bw", 8, most=[5, 9, 2, 1])[1].taken == (5, 4, 2, 1)
    assert "memory allows 5/9/2/1" in str(chosen("2bw", 8, most=[5, 9, 2, 1])[1])


LIMITED = [
    (3, None, 0.1, (4, 3, 2, 1)),  # 4/4/3/1 would idle for half of the time, these for 4 %
    (4, None, 1.1, (5, 4, 2, 1)),
    (8, (7, 3, 3, 3), 1.1, (5, 3, 2, 1)),
    (8, (4, 2, 1, 1), 0.4, (3, 2, 1, 1)),
]


@pytest.mark.parametrize(("m", "most", "latency", "taken"), LIMITED)
def test_where_a_rank_may_not_have_what_links_ask_for_the_others_have_fewer_too(m, most, latency, taken):
    asks = ScheduleRequest("2bw", 4, m, options={"in_flight": "auto"})
    assert choose_in_flight(asks, Costs(EQUAL.stages, latency), most)[1].taken == taken


@pytest.mark.long
@pytest.mark.parametrize(("m", "most", "latency", "taken"), LIMITED)
def test_no_other_numbers_that_are_allowed_idle_less(m, most, latency, taken):
    costs = Costs(EQUAL.stages, latency)
    least = long_run("2bw", taken, m, costs)
    for numbers in combinations_with_replacement(range(m + 1, 0, -1), 4):
        if all(n <= limit for n, limit in zip(numbers, most or numbers, strict=True)):
            assert long_run("2bw", numbers, m, costs) >= least - 1e-9, numbers


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_limits_of_unequal_ranks_make_them_wait_no_longer_than_they_must(seed):
    costs, m = drawn_costs(seed), 20
    request = ScheduleRequest("2bw", len(costs.stages), m, options={"in_flight": "auto"})
    asked = choose_in_flight(request, costs)[1].asked
    most = [max(n - 1 - rank % 2, 1) for rank, n in enumerate(asked)]
    choice = choose_in_flight(request, costs, most)[1]
    least = long_run("2bw", choice.taken, m, costs)
    draw = random.Random(seed)
    for _ in range(12):
        numbers = tuple(sorted((draw.randint(1, limit) for limit in most), reverse=True))
        if all(n <= limit for n, limit in zip(numbers, most, strict=True)):
            assert long_run("2bw", numbers, m, costs) >= least - 1e-9, (numbers, choice)


def test_what_a_limit_leaves_keeps_to_it_and_to_the_delay():
    """Of some ranks fewer in flight than without links, of others more: neither is a reason to exceed the other."""
    slow = [(0, 0), (0, 0), (9, 9)]
    least = partial(least_in_flight, rank_times(EQUAL, splits=False), slow)
    request = ScheduleRequest("stash", 4, 8, options={"in_flight": "auto"})
    choice = as_allowed(request, lambda limits: least(most=limits), most=(3, 3, 3, 1))
    assert choice.taken == (3, 3, 2, 1)
    assert "rank 2 reads would be" in str(choice)


@pytest.mark.parametrize("method", ["stash", "newest", "pipemare", "spectrain"])
def test_auto_makes_no_weights_later_unless_it_may(method):
    request, choice = chosen(method, 8)
    assert choice.taken == choice.plain == (4, 3, 2, 1)
    assert "rank 0 reads would be 0.75 instead of 0.375 updates late (in_flight=auto+delay accepts that)" in str(choice)
    assert chosen(method, 8, "auto+delay")[1].taken == (7, 5, 3, 1)
    assert request.prove().activations == prove(method, 4, 8).activations


def test_auto_of_a_flushed_batch_is_at_most_the_batch():
    assert chosen("1f1b", 3)[1].taken == (3, 3, 3, 1)


def test_numbers_that_are_not_asked_for_stay():
    request = ScheduleRequest("2bw", 4, 8, options={"in_flight": 5})
    assert choose_in_flight(request, EQUAL) == (request, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (0, "at least 1"),
        ((3, 2), "has 2 numbers, but there are 4 ranks"),
        ((3, 4, 1, 1), "4 on rank 1, but 3 on the rank before it"),
        ((3, 2, 0, 1), "at least 1"),
        ("three", "whole number"),
    ],
)
def test_what_is_no_number_in_flight_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        check_in_flight("in_flight", given, 4)
    with pytest.raises(ConfigError, match=words):
        make_schedule("2bw", 4, 8, options={"in_flight": given})


def test_every_order_takes_auto_or_says_why_not():
    assert {name for name, order in ORDERS.items() if order not in ASK_LINKS} == WITHOUT_AUTO.keys()
    for row in METHODS.values():
        if row.order in WITHOUT_AUTO:
            said = f"{row.name} does not take in_flight='auto': {WITHOUT_AUTO[row.order]}"
            with pytest.raises(ConfigError, match=re.escape(said)):
                chosen(row.name, 8)
    with pytest.raises(ConfigError, match="method gpipe does not take in_flight='auto': it has all microbatches"):
        choices.method("gpipe", in_flight="auto")
    with pytest.raises(ConfigError, match="zb-h2-post does not take in_flight='auto': where an update is taken back"):
        chosen("zb-h2-post", 8)


def test_an_order_of_ones_own_takes_no_auto():
    def own(stages: int, microbatches: int, *, in_flight: int = 1) -> list[str]:
        return ["F0 B0"] * stages

    with pytest.raises(ConfigError, match="order own does not take in_flight='auto': nothing is known"):
        make_schedule(own, 1, 1, options={"in_flight": "auto"})


def test_a_schedule_that_is_made_has_no_links_to_ask():
    with pytest.raises(ConfigError, match="make_schedule knows no links, so in_flight='auto' finds nothing"):
        penstock.make_schedule("2bw", 4, 8, options={"in_flight": "auto"})


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("zb-h1", None), ("zb-h1", (7, 5, 3, 1)), ("zb-h1", (6, 6, 6, 6)), ("zb-h1", (0, 4, 4, 4)),
        ("zb-h2", (5, 5, 5, 4)), ("zb-v", (5, 6, 5, 5)), ("zb-v", (0, 4, 4, 4)),
        ("zb-interleaved", None), ("zb-interleaved", (6, 6, 6, 6)), ("zb-interleaved", (3, 3, 3, 3)),
    ],
)  # fmt: skip
def test_what_is_held_with_halves_of_backwards_is_said_and_keeps_to_memory(method, most):
    request, choice = chosen(method, 8, most=most)
    assert choice.held == tuple(map(math.ceil, request.prove().activations))
    if most is not None:
        assert f"memory allows {write_in_flight(most)}" in str(choice)
        assert all(held <= max(limit, 1) for held, limit in zip(choice.held, most, strict=True))
        assert " that are held with them" in str(choice)
        assert ("where a rank needs one" in str(choice)) == (min(most) < 1)


def test_memory_for_fewer_than_interleaved_zero_bubble_can_do_with_leaves_the_least():
    costs = Costs((StageCost(1, 1, 1),) * 4, 0.5)
    asks = ScheduleRequest("zb-interleaved", 4, 8, options={"in_flight": "auto"})
    request, choice = choose_in_flight(asks, costs, (1, 1, 1, 1))
    assert "less than the least that the order can do with" in str(choice)
    assert (choice.taken, choice.held) == ((5,), (3, 3, 3, 3))
    assert choice.held == tuple(map(math.ceil, request.prove().activations))


def test_forwards_ahead_are_not_called_microbatches():
    assert str(chosen("zb-h1", 8)[1]) == (
        "7/5/3/1 forwards ahead on ranks 0 to 3, which hold 7/7/7/7 microbatches (4/3/2/1 where messages take no time)"
    )
    costs = Costs((StageCost(1, 1, 1),) * 2, 0.5)
    _, choice = choose_in_flight(ScheduleRequest("zb-v", 2, 6, options={"in_flight": "auto"}), costs)
    assert choice.counted == "3 microbatches, of which ranks 0 and 1 hold 3/3"


@pytest.mark.parametrize("method", ["zb-h2", "zb-v"])
@pytest.mark.parametrize(("ranks", "latency"), [(2, 0.5), (3, 0.25), pytest.param(4, 0.75, marks=pytest.mark.long)])
def test_zero_bubble_stays_without_a_bubble_on_slow_links(method, ranks, latency):
    costs = Costs((StageCost(1, 1, 1),) * ranks, latency)
    request, choice = choose_in_flight(ScheduleRequest(method, ranks, 6 * ranks, options={"in_flight": "auto"}), costs)
    assert idle(request, latency) == pytest.approx(0, abs=1e-9)
    assert idle(ScheduleRequest(method, ranks, 6 * ranks), latency) > 0.01
    fewer = replace(request, options={"in_flight": choice.taken[0] - 1})
    assert idle(fewer, latency) > 0.001


@pytest.mark.parametrize(
    ("ranks", "m", "latency", "times"),
    [
        (2, 8, 0.75, (1, 1, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(3, 9, 0.5, (1, 1.2, 0.8)), (4, 12, 0.5, (1, 1, 1))]
        ),
    ],
)
def test_interleaved_zero_bubble_takes_nearly_the_best_numbers_for_slow_links(ranks, m, latency, times):
    asks = ScheduleRequest("zb-interleaved", ranks, m, options={"in_flight": "auto"})
    request, choice = choose_in_flight(asks, Costs((StageCost(*times),) * ranks, latency))

    def takes(group: int, in_flight: int) -> float:
        try:
            proof = replace(asks, options={"group": group, "in_flight": in_flight}).prove()
        except ScheduleError:
            return math.inf
        return simulate_schedule(proof, Costs.uniform(proof.schedule, *times, latency=latency)).bubble.makespan

    every = [takes(group, n) for group in range(ranks, m + 1, ranks) for n in range(group + 1, group + 6 * ranks, 2)]
    assert takes(choice.group, choice.taken[0]) <= 1.03 * min(every)
    assert takes(ranks, choice.plain[0]) > 1.2 * min(every)
    assert request.options == {"group": choice.group, "in_flight": choice.taken[0]}
    of_ranks = "ranks 0 and 1" if ranks == 2 else f"ranks 0 to {ranks - 1}"
    assert choice.counted.endswith(
        f"in groups of {choice.group}, of which {of_ranks} hold {write_in_flight(choice.held)}"
    )


def idle(request: ScheduleRequest, latency: float) -> float:
    """The bubble of one more batch, of ranks with F = I = W."""
    proof = request.prove()
    costs = Costs.uniform(proof.schedule, 1, 1, 1, latency=latency)
    return steady_bubble(simulate_schedule(proof, costs).lowered, costs, proof.steady_from + 2)


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4, 5, 7, 10, 20])
@pytest.mark.parametrize("m", [1, 5, 12])
def test_any_number_on_a_v_is_proven_and_no_rank_holds_more(in_flight, m):
    proof = prove("zb-v", 3, m, options={"in_flight": in_flight})
    assert max(proof.activations) <= min(in_flight, m)


def test_links_that_take_no_time_leave_zero_bubble_as_it_is():
    for method in ("zb-h1", "zb-h2", "zb-v", "zb-interleaved"):
        asks = ScheduleRequest(method, 4, 8, options={"in_flight": "auto"})
        assert choose_in_flight(asks, EQUAL)[0].schedule.programs == make_schedule(method, 4, 8).programs


@pytest.mark.parametrize("method", ["2bw", "1f1b", "zb-h1", "zb-h2", "zb-v", "zb-interleaved", "interleaved", "stash"])
@pytest.mark.parametrize(("ranks", "m"), [(1, 1), (1, 4), (2, 1), (3, 1)])
def test_one_is_no_plural(method, ranks, m):
    asks = ScheduleRequest(method, ranks, m, options={"in_flight": "auto"})
    for most in (None, (1,) * ranks):
        try:
            choice = choose_in_flight(asks, Costs((StageCost(1, 1, 1),) * ranks, 0.75), most)[1]
        except ScheduleError:
            continue
        assert re.search(r"(?<![/\d.])1 (microbatches|forwards|ranks)", str(choice)) is None


@pytest.mark.parametrize("text", ["auto", "auto+delay", "7", "7/5/3/1"])
def test_it_is_written_as_it_is_read(text):
    assert write_in_flight(read_in_flight(text)) == text


@pytest.mark.parametrize("text", ["", "often", "7/", "1.5", "-1", "7/x", "1" * 12])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="in_flight takes a number"):
        read_in_flight(text)


def per_microbatch(request: ScheduleRequest, costs: Costs) -> float:
    """The time that each more microbatch adds to a flushed batch, over that of its passes on a rank."""
    ends = []
    for m in (48, 96):
        proof = replace(request, microbatches=m).prove()
        share = costs.stages[0]
        times = share.forward, share.backward_input, share.backward_weight
        of_chunks = Costs.uniform(proof.schedule, *times, latency=costs.latency)
        ends.append(simulate_schedule(proof, of_chunks).bubble.makespan)
    return (ends[1] - ends[0]) / 48 / sum(times)


@pytest.mark.parametrize("seed", range(8))
def test_interleaved_needs_larger_groups_and_more_in_flight(seed):
    draw = random.Random(seed)
    ranks, chunks, share = (
        draw.choice((2, 3, 4)),
        draw.choice((2, 3)),
        draw.choice(((1, 1, 1), (1, 1.3, 0.8), (2, 1, 1))),
    )
    costs = Costs((StageCost(*share),) * ranks, 2 * draw.choice((0.05, 0.3, 0.9, 1.6, 2.5)) * draw.random())
    asks = ScheduleRequest("interleaved", ranks, 48, options={"chunks": chunks, "in_flight": "auto"})
    request, _ = choose_in_flight(asks, costs)
    group, number = request.options["group"], request.options["in_flight"]
    assert per_microbatch(request, costs) == pytest.approx(1, abs=1e-9)
    fewer = replace(request, options={**request.options, "in_flight": number - 1})
    assert per_microbatch(fewer, costs) > 1 + 1e-4
    if group > ranks:
        options = {**request.options, "group": group - 1, "in_flight": number - (chunks - 1)}
        assert per_microbatch(replace(request, options=options), costs) > 1 + 1e-4


def test_interleaved_says_which_group_would_do():
    request, choice = chosen("interleaved", 5)
    assert request.options == {"in_flight": choice.taken[0], "group": 5}
    assert "a group has 5 microbatches where 5 would do" not in str(choice)
    _, choice = choose_in_flight(
        ScheduleRequest("interleaved", 4, 5, options={"in_flight": "auto"}), Costs(EQUAL.stages, 2.5)
    )
    assert "a group has 5 microbatches where 10 would do" in str(choice)
    assert str(choice).startswith(f"{choice.taken[0]} passes of chunks on rank 0 (links ask for ")


@pytest.mark.parametrize(("ranks", "chunks", "m", "hop"), [(4, 4, 16, 0.3), (4, 2, 12, 1.0), (3, 2, 11, 0.5)])
def test_groups_of_unequal_size_have_what_they_were_counted_for(ranks, chunks, m, hop):
    """Asked for groups of 5, 16 microbatches make 6, 5, 5; groups of 6 would be 8, 8."""
    asks = ScheduleRequest("interleaved", ranks, m, options={"chunks": chunks, "in_flight": "auto"})
    request, choice = choose_in_flight(asks, Costs((StageCost(1, 1, 1),) * ranks, hop))
    activations = [float(each) * chunks for each in request.prove().activations]
    assert activations[0] == choice.taken[0]
    assert all(a > b for a, b in pairwise(activations))  # the later a rank, the fewer


def test_memory_of_every_rank_limits_passes_of_chunks():
    asks = ScheduleRequest("interleaved", 4, 16, options={"chunks": 2, "in_flight": "auto"})
    times = rank_times(Costs((StageCost(1, 1, 1),) * 4), splits=False)
    free = choose_interleaved(asks, times, 2.0)
    least = 4 + 1  # of the last rank: the microbatches of a group, and one
    tight = choose_interleaved(asks, times, 2.0, most=[100, 100, 100, least])
    assert float(tight.applied(asks).prove().activations[-1]) * 2 == least
    assert free.taken > tight.taken >= tight.plain
    assert "memory allows 100/100/100/5" in str(tight)


def test_a_group_that_is_given_counts_as_plain():
    asks = ScheduleRequest("interleaved", 4, 16, options={"group": 8, "in_flight": "auto"})
    _, choice = choose_in_flight(asks, Costs((StageCost(1, 1, 1),) * 4))
    assert choice.taken == choice.plain == (15,)
    assert choice.group == 8


def test_hops_may_have_times_of_their_own_there_and_back():
    """One slow link costs what a slow hop there and back costs, whichever of both ways takes the time."""
    times = rank_times(EQUAL, splits=False)
    assert least_in_flight(times, 0.75) == least_in_flight(times, [(0.75, 0.75)] * 3) == (7, 5, 3, 1)
    assert least_in_flight(times, [(0, 0), (1.5, 0), (0, 0)]) == (5, 4, 2, 1)
    assert least_in_flight(times, [(0, 0), (0, 1.5), (0, 0)]) == (5, 4, 2, 1)
    assert least_in_flight(times, [(0, 0), (0, 0), (2, 2)]) == (6, 5, 4, 1)


def test_a_wait_that_is_not_worth_a_microbatch_is_left():
    times = rank_times(EQUAL, splits=False)
    assert least_in_flight(times, 0.03, leave=0.02) == (4, 3, 2, 1)
    assert least_in_flight(times, 0.05, leave=0.02) > (4, 3, 2, 1)


def test_a_longer_delay_that_is_accepted_is_said():
    assert "the weights that rank 0 reads are 0.75 instead of 0.375 updates late" in str(
        chosen("stash", 8, "auto+delay")[1]
    )
    assert chosen("2bw", 8, "auto+delay")[1].later == ""


def test_a_run_takes_two_batches_more_than_its_ranks_at_most():
    request = ScheduleRequest("stash", 3, 4, options={"in_flight": "auto+delay"})
    times = rank_times(Costs(EQUAL.stages[:3]), splits=False)
    choice = as_allowed(request, lambda limits: least_in_flight(times, 43, most=limits))
    assert (choice.asked, choice.taken) == ((61, 31, 1), (11, 6, 1))
    assert "a run takes at most 11, those of its 3 ranks and of two batches of 4 microbatches, where 29" in str(choice)
