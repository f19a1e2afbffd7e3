"""Processes with slow links get more microbatches in flight, where that changes no numbers or is allowed."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from penstock.errors import ConfigError, DataError
from penstock.options.parallelism import Microbatches
from penstock.runtime.execute.evaluation_without_draining import Evaluating
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.plan.adapted_in_flight import MEASURED, AdaptedInFlight, adapt
from penstock.runtime.plan.pass_and_message_times import Measured
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.schedule.build import ScheduleRequest
from penstock.schedule.in_flight_choice import NO_LINKS_HERE, InFlightChoice
from penstock.schedule.methods.data_parallel_sync import Combine
from penstock.simulate.auto_of_chunks import costs_of_stages
from penstock.simulate.least_in_flight import RankTimes
from penstock.simulate.simulate import simulate_schedule
from support.cases import (
    OPTIMIZERS,
    Case,
    Outcome,
    Recording,
    add_decisions,
    assert_equal_tensors,
    assert_same,
    expected,
    finish,
    make_batches,
    make_pipeline,
    run_spans,
    together,
)
from support.pool import Pool
from support.slow_links import HOLD, slow_blocks, slow_links
from support.snapshots import Kept

pytestmark = pytest.mark.processes

CASE = Case("2bw", 2, 4, spans=(7,), skips=())


class Ran(NamedTuple):
    """What is known of a run on one rank."""

    outcome: Outcome
    found: AdaptedInFlight | None
    numbers: Any
    batches: int
    kept: list[Snapshot]
    evaluated: list[tuple[int, float | None]]


def pipeline_of(group: dist.ProcessGroup | None, case: Case, recording: Recording, **more: Any) -> Pipeline:
    asked = {"method": case.method, "stages": case.depth, "microbatches": case.m, "in_flight": "auto"}
    return make_pipeline(case, group, optimizer=recording, blocks=slow_blocks(), **asked | more)


def run(
    group: dist.ProcessGroup | None,
    case: Case,
    more: dict[str, Any],
    kept: Kept | None = None,
    every: int | None = None,
    evaluates: int | None = None,
    stop: int | None = None,
    fails: int | None = None,
    hold: float = HOLD,
) -> Ran:
    """Run the batches of a case in one span, over slow links, from a saved state or the beginning on.

    Args:
        more: arguments of the pipeline.
        kept: a saved state.
        every, evaluates: batches between two snapshots, or evaluations.
        stop: the batch at whose report the run is told to stop.
        fails: the batch at which the loader fails.
        hold: seconds that a message takes.
    """
    recording, outcome, snapshots, evaluated = Recording(OPTIMIZERS[case.optimizer]), Outcome(), [], []
    with slow_links(hold):
        pipeline = pipeline_of(group, case, recording, **more)
        if kept is not None:
            pipeline.load(kept)
        data = make_batches(case)

        def batches() -> Any:
            for number in range(pipeline.batches, len(data)):
                if number == fails:
                    raise ZeroDivisionError
                yield data[number]

        save = None if every is None else Saving(every, snapshots.append)
        evaluate = None if evaluates is None else Evaluating(evaluates, data[:1])
        try:
            for report in pipeline.run(batches(), save=save, evaluate=evaluate):
                outcome.reports.append((report.batch, report.loss, report.weight))
                add_decisions(outcome, case, report.decided)
                evaluated += [(found.version, found.loss) for found in report.evaluated]
                if report.batch == stop:
                    pipeline.stop()
        except (ZeroDivisionError, DataError):
            pass
        add_decisions(outcome, case, pipeline.decided())
        evaluated += [(found.version, found.loss) for found in pipeline.evaluated()]
        numbers = [float(held) for held in pipeline.proof.activations]
    return Ran(
        finish(outcome, pipeline, recording), pipeline.in_flight, numbers, pipeline.batches, snapshots, evaluated
    )


def run_on_ranks(
    pool: Pool, case: Case, *, ranks: int = 2, in_flight: str = "auto", limit: float | None = None, **more: Any
) -> list[Ran]:
    """What all ranks know; they agree on what was found."""
    arguments = {"in_flight": in_flight, "in_flight_bytes": limit}
    found: list[Ran] = pool.submit(run_by_name, case, arguments, more, ranks=ranks)
    assert len({repr((ran.found, ran.numbers, ran.batches)) for ran in found}) == 1
    return found


def run_by_name(group: dist.ProcessGroup, case: Case, arguments: dict[str, Any], more: dict[str, Any]) -> Ran:
    return run(group, case, arguments, **more)


def saved(ran: list[Ran], batch: int) -> Kept:
    return Kept([snapshot for each in ran for snapshot in each.kept if snapshot.batch == batch])


def test_slow_links_get_more_and_the_bits_are_those_of_plain_2bw(pool: Pool) -> None:
    ran = run_on_ranks(pool, CASE)
    found = ran[0].found
    assert found is not None
    assert (found.batch, found.numbers, found.choice.plain) == (MEASURED, (3, 1), (2, 1))
    assert ran[0].numbers == [3, 1]
    assert found.window >= 2
    assert_same(together([each.outcome for each in ran]), expected(CASE))


@pytest.mark.long
def test_evaluations_and_snapshots_are_those_of_a_run_that_does_not_halt(pool: Pool) -> None:
    ran = run_on_ranks(pool, CASE, every=2, evaluates=2)
    plain = run(None, CASE, {}, every=2, evaluates=2)
    assert ran[-1].evaluated == plain.evaluated
    assert [version for version, _ in plain.evaluated] == [2, 4, 6]
    for batch in (2, 4, 6):
        here, there = saved(ran, batch), saved([plain], batch)
        assert_equal_tensors(here.tensors, there.tensors, f"snapshot {batch}")
        assert ("found" in next(iter(here.facts["in_flight"].values()))) == (batch >= MEASURED)


def test_an_evaluation_is_not_lost_where_older_weights_are_not_kept(pool: Pool) -> None:
    """Under 2bw-ahead the run halts once batch 3 has been trained on, and the pipeline is drained for version 3."""
    case = replace(CASE, method="2bw-ahead")
    *_, last = run_on_ranks(pool, case, evaluates=3)
    assert last.found is not None
    assert last.found.batch == MEASURED
    assert [version for version, _ in last.evaluated] == [3, 6]


@pytest.mark.parametrize("batch", [2, 4, 6])
def test_a_resumed_run_goes_on_with_what_was_found(pool: Pool, batch: int) -> None:
    first = run_on_ranks(pool, CASE, every=2)
    again = run_on_ranks(pool, CASE, kept=saved(first, batch))
    if batch >= MEASURED:
        assert repr(again[0].found) == repr(first[0].found)
    found = again[0].found
    assert found is not None
    assert (found.batch, again[0].numbers) == (MEASURED, [3, 1])
    assert_equal_tensors(
        together([each.outcome for each in again]).weights, together([each.outcome for each in first]).weights, "end"
    )


def test_stash_stays_as_it_is_and_says_why(pool: Pool) -> None:
    case = replace(CASE, method="stash")
    ran = run_on_ranks(pool, case)
    found = ran[0].found
    assert found is not None
    assert found.numbers == (2, 1)
    assert found.choice.asked == (3, 1)
    assert "as before: messages take" in str(found)
    assert "links ask for 3/1, but the weights that rank 0 reads would be 0.5 instead of 0.25 updates late" in str(
        found
    )
    assert_same(together([each.outcome for each in ran]), expected(replace(case, spans=(MEASURED, 3))))


@pytest.mark.parametrize("batch", [3, 6])
def test_delays_grow_where_that_is_allowed_and_a_resumed_run_has_the_same_bits(pool: Pool, batch: int) -> None:
    case = replace(CASE, method="stash", spans=(8,))
    first = run_on_ranks(pool, case, in_flight="auto+delay", every=3)
    found = first[0].found
    assert found is not None
    assert found.numbers == (3, 1)
    assert "the weights that rank 0 reads are 0.5 instead of 0.25 updates late" in str(found)
    again = run_on_ranks(pool, case, in_flight="auto+delay", every=3, kept=saved(first, batch))
    assert again[0].numbers == [3, 1]
    whole, rest = (together([each.outcome for each in ran]) for ran in (first, again))
    assert_equal_tensors(rest.weights, whole.weights, "weights")
    assert rest.reports == whole.reports[batch:]
    if batch > MEASURED:
        alone = run(None, case, {"in_flight": "auto+delay"}, every=3, kept=saved(first, batch))
        assert_equal_tensors(alone.outcome.weights, whole.weights, "weights in one process")


@pytest.mark.parametrize("how", [{"stop": 0}, {"fails": 3}])
def test_nothing_is_chosen_by_a_run_that_ends_before(pool: Pool, how: dict[str, int]) -> None:
    ran = run_on_ranks(pool, CASE, **how)
    assert ran[0].batches <= MEASURED
    assert ran[0].found is None or ran[0].batches == MEASURED
    if "fails" in how:
        assert (ran[0].found, ran[0].batches) == (None, 3)


@pytest.mark.long
def test_memory_limits_it(pool: Pool) -> None:
    ran = run_on_ranks(pool, CASE, limit=1.0)
    found = ran[0].found
    assert found is not None
    assert found.numbers == (1, 1)
    assert "memory allows 0/0, where a rank needs one" in str(found)
    assert run_on_ranks(pool, CASE, limit=math.inf)[0].numbers == [3, 1]
    enough = run_on_ranks(pool, CASE, limit=1.6 * found.measured.nbytes[0])  # two microbatches took so much
    assert enough[0].numbers == [3, 1]
    scarce = run_on_ranks(pool, CASE, limit=1.4 * found.measured.nbytes[0])
    assert (scarce[0].numbers, "memory allows 2/" in str(scarce[0].found)) == ([2, 1], True)
    assert_same(together([each.outcome for each in ran]), expected(CASE))


def test_parallel_pipelines_choose_alike(pool: Pool) -> None:
    case = replace(CASE, width=2, spans=(6,))
    ran = run_on_ranks(pool, case, ranks=4)
    assert ran[0].numbers == [3, 1]


@pytest.mark.long
def test_interleaved_gets_a_larger_group_and_keeps_its_bits(pool: Pool) -> None:
    case = Case("interleaved", 2, 6, spans=(6,), skips=(), clip=0.6)
    ran = run_on_ranks(pool, case, hold=2 * HOLD)
    found = ran[0].found
    assert found is not None
    assert (found.choice.plain, found.choice.group) == ((5,), 3)
    assert found.numbers[0] in (6, 7)  # on a busy machine passes take longer, so fewer fill the time of a message
    assert ran[0].numbers[0] == found.numbers[0] / 2  # each pass takes a microbatch through half of the rank's share
    assert AdaptedInFlight.of_state(found.state()) == found
    assert_same(together([each.outcome for each in ran]), expected(case))
    scarce = run_on_ranks(pool, case, limit=1.1 * found.measured.nbytes[0], hold=2 * HOLD)[0]
    assert scarce.found is not None
    assert (scarce.found.numbers, scarce.numbers[0]) == ((5,), 2.5)
    assert "memory allows 5" in str(scarce.found)


@pytest.mark.long
def test_interleaved_zero_bubble_gets_more_in_flight_and_keeps_its_bits(pool: Pool) -> None:
    case = Case("zb-interleaved", 2, 6, spans=(6,), skips=(), clip=0.6)
    ran = run_on_ranks(pool, case, hold=2 * HOLD)
    found = ran[0].found
    assert found is not None
    assert found.choice.plain == (4,) < found.numbers
    assert AdaptedInFlight.of_state(found.state()) == found
    assert_same(together([each.outcome for each in ran]), expected(case))


def test_in_one_process_messages_take_no_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="penstock")
    ran = run(None, replace(CASE, spans=(5,)), {})
    assert (ran.found, ran.numbers) == (None, [2, 1])
    assert [line for line in caplog.messages if "in flight" in line] == [f"in flight: {NO_LINKS_HERE}"]
    assert_same(ran.outcome, expected(replace(CASE, spans=(5,))))


def in_turns(group: dist.ProcessGroup, case: Case) -> tuple[Outcome, Any]:
    recording = Recording(OPTIMIZERS[case.optimizer])
    with slow_links(HOLD):
        pipeline = pipeline_of(group, case, recording)
        return finish(run_spans(pipeline, case), pipeline, recording), pipeline.in_flight


@pytest.mark.parametrize("spans", [(4, 1), pytest.param((1,) * 6, marks=pytest.mark.long)])
def test_runs_that_end_where_they_would_halt_choose_when_the_next_one_begins(
    pool: Pool, spans: tuple[int, ...]
) -> None:
    case = replace(CASE, spans=spans)
    ran = pool.submit(in_turns, case, ranks=2)
    assert (ran[0][1].batch, ran[0][1].numbers) == (MEASURED, (3, 1))
    assert_same(together([outcome for outcome, _ in ran]), expected(case))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"width": 2, "combine": Combine("average", every=2)}, "combine=average"),
        ({"width": 2, "combine": Combine("wsp", every=2)}, "combine=wsp"),
        ({"method": "1f1b", "delays": 1}, "delays of your own choice"),
    ],
)
def test_what_cannot_go_on_with_other_numbers_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"in_flight='auto' does not go with {why}, under which stages cannot go on"):
        pipeline_of(None, replace(CASE, width=changes.get("width", 1)), Recording(OPTIMIZERS["adamw"]), **changes)


def test_a_limit_of_bytes_for_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_flight_bytes limits what in_flight='auto' takes, but in_flight=7 asks"):
        Microbatches(8, 7, 2e9)


@pytest.mark.long
def test_another_limit_of_bytes_asks_for_another_choice(pool: Pool) -> None:
    first = run_on_ranks(pool, replace(CASE, spans=(6,)), every=5)
    again = run_on_ranks(pool, replace(CASE, spans=(10,)), limit=1.0, kept=saved(first, 5))
    assert (first[0].numbers, again[0].numbers) == ([3, 1], [1, 1])


class FewLinks(NamedTuple):
    """As much of a plan as a choice looks at."""

    auto: ScheduleRequest
    limit: float | None = None

    @property
    def options(self) -> Any:
        return SimpleNamespace(microbatches=SimpleNamespace(in_flight_bytes=self.limit))

    @property
    def proof(self) -> Any:
        return self.auto.prove()

    def adapted(self, choice: InFlightChoice, window: int) -> Any:
        request = replace(choice.applied(self.auto), window=window)
        return SimpleNamespace(prove=lambda: SimpleNamespace(proof=request.prove()))


def adapted(request: ScheduleRequest, limit: float | None = None, hop: float = 0.75) -> AdaptedInFlight:
    """What ranks choose whose halves of backwards leave more than whole forwards on the second one."""
    times = RankTimes(1.0, 1.0, 1.0)
    measured = Measured((times, times), ((hop, hop),), (200, 230), each=(100, 130))
    return adapt(FewLinks(request, limit), measured, MEASURED)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "held"), [(361.0, (3, 3)), (359.0, (2, 2)), (199.0, (1, 1))])
def test_halves_that_are_put_off_count_with_what_they_keep(limit: float, held: tuple[int, ...]) -> None:
    """361 bytes are the 230 of two microbatches and the 130 of one more."""
    assert adapted(ScheduleRequest("zb-h1", 2, 8, options={"in_flight": "auto"}), limit).choice.held == held


@pytest.mark.parametrize("method", ["zb-h2", "zb-v"])
def test_a_window_that_lets_no_more_through_leaves_what_the_order_has(method: str) -> None:
    found = adapted(ScheduleRequest(method, 2, 6, options={"in_flight": "auto"}, window=1), hop=1.5)
    assert (found.numbers, found.window) == (found.choice.plain, 1)
    assert f"but they do not go with the other options ({method} cannot run with a window of 1" in str(found)
    assert "\n" not in str(found)
    wider = adapted(ScheduleRequest(method, 2, 6, options={"in_flight": "auto"}, window=3), hop=1.5)
    assert wider.numbers > wider.choice.plain


@pytest.mark.long
def test_stages_on_a_v_get_more_and_keep_their_bits(pool: Pool) -> None:
    case = Case("zb-v", 2, 4, spans=(6,), skips=(), clip=0.6)
    ran = run_on_ranks(pool, case, hold=4 * HOLD)
    found = ran[0].found
    assert found is not None
    assert found.numbers > found.choice.plain == (2,)
    assert list(found.choice.held) == [math.ceil(number) for number in ran[0].numbers]
    assert AdaptedInFlight.of_state(found.state()) == found
    assert_same(together([each.outcome for each in ran]), expected(case))


def test_what_was_found_is_written_as_it_is_read(pool: Pool) -> None:
    found = run_on_ranks(pool, CASE)[0].found
    assert found is not None
    assert AdaptedInFlight.of_state(found.state()) == found
    assert repr(found).startswith(
        "<In flight from batch 4 on: 3/1 microbatches on ranks 0 and 1 instead of 2/1: messages "
    )


def test_numbers_are_given_to_the_order_of_a_method() -> None:
    case = replace(CASE, spans=(3,))
    assert pipeline_of(None, case, Recording(OPTIMIZERS["adamw"]), in_flight=3).proof.activations == (3, 1)
    assert ScheduleRequest("2bw", 2, 4, options={"in_flight": 3}).prove().activations == (3, 1)


def test_a_finished_schedule_takes_no_microbatches_in_flight() -> None:
    with pytest.raises(ConfigError, match=r"in_flight='auto' is an option of the order of a method"):
        make_pipeline(CASE, in_flight="auto")
    with pytest.raises(ConfigError, match="in_flight_bytes must be positive"):
        Microbatches(8, "auto", -1)
    with pytest.raises(ConfigError, match="in_flight takes a number"):
        Microbatches(8, "often")


def runs_on_a_number(group: dist.ProcessGroup) -> str:
    pipeline = pipeline_of(group, CASE, Recording(OPTIMIZERS["adamw"]))
    with pytest.raises(DataError) as caught:
        list(pipeline.run(5))  # type: ignore[arg-type]
    return str(caught.value)


def test_what_is_no_data_is_refused_as_ever(pool: Pool) -> None:
    said = pool.submit(runs_on_a_number, ranks=2)
    assert "batches must be an iterable of batches" in said[0]


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 2, 4, spans=(6,), skips=(), clip=0.6, recompute="stage"),
        Case("zb-h1", 2, 4, spans=(6,), skips=(), clip=0.6),
        Case("zb-h2", 2, 4, spans=(6,), skips=(), clip=0.6),
        Case("2bw", 2, 4, spans=(6,), skips=(1,), clip=0.6, precision="bf16"),
    ],
    ids=lambda case: case.method,
)
def test_the_bits_are_the_same_with_other_options(pool: Pool, case: Case) -> None:
    ran = run_on_ranks(pool, case)
    assert ran[0].found is not None
    assert case.recompute != "none" or ran[0].found.numbers == ((4, 1) if case.method == "zb-h2" else (3, 1))
    assert_same(together([each.outcome for each in ran]), expected(case))


@pytest.mark.parametrize(("hop", "more"), [(0.0, 0), (1.5, 1)])
def test_the_news_of_posted_receives_gets_room_where_links_ask_for_more(hop: float, more: int) -> None:
    request = ScheduleRequest("2bw", 2, 8, options={"in_flight": "auto"})
    found = adapted(request, hop=hop)
    assert (found.numbers > found.choice.plain) is bool(more)
    proof = found.choice.applied(request).prove()
    costs = costs_of_stages(proof.schedule, found.measured.times, found.measured.message, halves=False)
    assert found.window == simulate_schedule(proof, costs).window + more
