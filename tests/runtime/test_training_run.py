"""A run that is left, interrupted or never begun."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Group, Pipeline
from penstock.errors import PenstockError
from support.pool import Pool

BATCHES = 6


class Interrupts(nn.Module):
    """Is called as often as microbatches pass, and gets signals at some of these moments."""

    def __init__(self, at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count in self.at:
            signal.raise_signal(signal.SIGINT)
        return x


def make_pipeline(
    method: str = "2bw", at: tuple[int, ...] = (), group: dist.ProcessGroup | None = None, **options: Any
) -> Pipeline:
    torch.manual_seed(0)
    blocks = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), Interrupts(at), nn.Linear(4, 2)]
    options = {"stages": 2} | options
    return Pipeline(
        blocks,
        method=method,
        microbatches=2,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
        partition=[2, 3],
        group=Group(group, 20.0),
        **options,
    )


def batches(count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def weights_of(pipeline: Pipeline) -> list[Tensor]:
    return [tensor.clone() for tensor in pipeline.state_dict().values()]


def assert_as_after(pipeline: Pipeline, count: int) -> None:
    """It is where a run over so many batches ends, and goes on from there."""
    wanted = make_pipeline(pipeline.schedule.name)
    list(wanted.run(batches()[:count]))
    assert pipeline.batches == count
    for rest in ([], batches()[count:]):
        for each in (pipeline, wanted):
            list(each.run(rest))
        for found, known in zip(weights_of(pipeline), weights_of(wanted), strict=True):
            assert torch.equal(found, known)


@pytest.mark.parametrize("method", ["1f1b", "2bw", "stash"])
def test_an_interrupt_finishes_what_is_under_way(method: str) -> None:
    pipeline, reports = make_pipeline(method, at=(5,)), []  # in the third batch
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for report in pipeline.run(batches()):
            reports.append(report.batch)
    assert reports == list(range(pipeline.batches))
    assert 3 <= len(reports) < BATCHES
    assert_as_after(pipeline, len(reports))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = make_pipeline(at=(5, 6))
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.run(batches()))
    assert "the batches under way are finished; a second Ctrl-C ends the run at once" in caplog.text
    with pytest.raises(PenstockError, match=r"cannot go on \(KeyboardInterrupt\); batch.* Make a new Pipeline"):
        pipeline.snapshots()


def test_an_interrupt_that_a_loader_suffers_from_is_one() -> None:
    """As where Ctrl-C ends the processes of a DataLoader, too."""

    def loader() -> Iterator[Any]:
        yield from batches()[:3]
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a worker exited unexpectedly")

    pipeline = make_pipeline()
    with pytest.raises(KeyboardInterrupt) as caught:
        list(pipeline.run(loader()))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_as_after(pipeline, 3)


def test_an_interrupt_in_the_loop_is_not_deferred() -> None:
    pipeline, reports = make_pipeline(), []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for report in pipeline.run(batches()):
            reports.append(report.batch)
            if report.batch == 2:
                signal.raise_signal(signal.SIGINT)
    assert reports == [0, 1, 2]
    assert_as_after(pipeline, 4)  # one more had begun


@pytest.mark.parametrize("at", [(5,), (8,)])
def test_an_interrupt_is_raised_when_the_run_is_closed(at: tuple[int, ...]) -> None:
    """One that came while a report was made, after which the loop is left; and one while the rest is finished."""
    pipeline = make_pipeline("2bw", at)
    run = pipeline.run(batches())
    for report in run:
        if report.batch == 2:
            break
    with pytest.raises(KeyboardInterrupt):
        run.close()
    assert_as_after(pipeline, pipeline.batches)


def test_handlers_of_others_are_left_alone() -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        pipeline = make_pipeline(at=(5,))
        assert len(list(pipeline.run(batches()))) == BATCHES
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [signal.SIGINT]


def test_in_another_thread_no_handler_is_set() -> None:
    pipeline, found = make_pipeline(), []
    thread = threading.Thread(target=lambda: found.extend(pipeline.run(batches())))
    thread.start()
    thread.join()
    assert len(found) == BATCHES


def interrupted(group: dist.ProcessGroup, method: str) -> tuple[list[int], int]:
    """Every process gets the signal at a moment of its own."""
    at = (5,) if dist.get_rank(group) else ()
    pipeline, reports = make_pipeline(method, at, group=group), []
    source = batches(40)

    def loader() -> Iterator[Any]:
        for t, batch in enumerate(source):
            if t == 3 and dist.get_rank(group) == 0:
                signal.raise_signal(signal.SIGINT)
            yield batch

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as where nobody has changed it
    try:
        for report in pipeline.run(loader()):
            reports.append(report.batch)
        pytest.fail("the run was not interrupted")
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    list(pipeline.run(batches(1)))
    return reports, pipeline.batches


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_interrupted_ranks_end_after_the_same_batch(pool: Pool, method: str) -> None:
    first, second = pool.submit(interrupted, method, ranks=2)
    assert first == second
    assert len(first[0]) == first[1] - 1 < 40


def test_a_run_that_is_closed_is_over() -> None:
    pipeline = make_pipeline()
    run = pipeline.run(batches())
    next(run)
    with pytest.raises(PenstockError, match=r"is under way; end it first: .* call close\(\) on what run"):
        next(pipeline.run(batches()))
    run.close()
    assert list(run) == []
    assert_as_after(pipeline, pipeline.batches)


def test_a_run_that_nobody_asks_is_noticed() -> None:
    pipeline = make_pipeline()
    with pytest.warns(RuntimeWarning, match=r"nothing was trained; write: for report in pipeline.run\(loader\)"):
        pipeline.run(batches())
    pipeline.run(batches()).close()  # on purpose


CALLS = {
    "run": lambda pipeline: next(pipeline.run(batches())),
    "evaluate": lambda pipeline: pipeline.evaluate(batches()),
    "full_state_dict": lambda pipeline: pipeline.full_state_dict(),
    "load_state_dict": lambda pipeline: pipeline.load_state_dict(pipeline.state_dict()),
    "snapshots": lambda pipeline: pipeline.snapshots(),
    "switch": lambda pipeline: pipeline.switch("1f1b"),
    "look_out": lambda pipeline: pipeline.look_out(),
}


@pytest.mark.parametrize("first", ["run", "evaluate"])
def test_two_threads_never_have_one_pipeline(first: str) -> None:
    """From the first moment on: one thread is held while it reads its first batch, as is any other that gets so far."""
    pipeline, read, refused, failed = make_pipeline(), threading.Event(), threading.Event(), list[BaseException]()

    def held() -> Iterator[Any]:
        read.set()
        assert refused.wait(20)
        yield from batches(2)

    def work() -> None:
        try:
            (list(pipeline.run(held())) if first == "run" else pipeline.evaluate(held()))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert read.wait(20)
        for call in CALLS.values():
            with pytest.raises(PenstockError, match="a run or an evaluation of this pipeline is under way"):
                call(pipeline)
    finally:
        refused.set()
        thread.join()
    assert failed == []
    for call in CALLS.values():
        call(pipeline)


def test_of_calls_that_begin_together_one_is_made() -> None:
    """Eight threads leave a barrier at once; whoever reads data waits there until the seven others are refused."""
    pipeline, begin, refused = make_pipeline(), threading.Barrier(8), threading.Semaphore(0)
    said = list[str]()

    def held() -> Iterator[Any]:
        for _ in range(7):
            assert refused.acquire(timeout=20)
        yield from batches(2)

    def work(number: int) -> None:
        begin.wait(20)
        try:
            (list(pipeline.run(held())) if number % 2 else pipeline.evaluate(held()))
        except PenstockError as error:
            said.append(str(error))
            refused.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 7
    assert all("is under way; end it first" in text for text in said)


def test_a_run_is_worked_on_in_one_thread() -> None:
    pipeline = make_pipeline()

    def reads_itself() -> Iterator[Any]:
        yield from batches(1)
        next(run)

    run = pipeline.run(reads_itself())
    with pytest.raises(PenstockError, match="this run is under way already"):
        list(run)


UNFINISHED = """
import torch
from torch import nn

import penstock


class Says(nn.Module):
    def forward(self, x):
        print("forward", flush=True)
        return x


def start():
    run = pipeline.run([(torch.randn(4, 3), torch.randn(4, 2))] * 20)
    kept.extend([run, kept])  # a cycle, as with the frames of an exception
    next(run)
    print("the end", flush=True)


kept = []
pipeline = penstock.Pipeline(
    [nn.Linear(3, 4), Says(), nn.Linear(4, 2)],
    method="2bw",
    stages=2,
    microbatches=2,
    loss=nn.functional.mse_loss,
    optimizer=torch.optim.SGD,
)
start()
"""


@pytest.mark.long
def test_a_run_left_open_at_exit_is_abandoned() -> None:
    done = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "the end"


@pytest.mark.parametrize("method", ["1f1b", "2bw"])
def test_a_report_does_not_keep_a_gradient_waiting(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage reports a batch when it has run its last backward; the stages before wait for that."""
    backwards = []

    def forward(_: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        x.register_hook(lambda gradient: backwards.append(gradient.shape))
        return x

    monkeypatch.setattr(Interrupts, "forward", forward)
    for report in make_pipeline(method).run(batches()[:2]):
        assert len(backwards) >= 2 * (report.batch + 1)


def callers_and_backwards(group: dist.ProcessGroup) -> list[list[str]]:
    """What each rank has done last and first of these in a batch: its last backward, and handing out its report."""
    pipeline = make_pipeline("1f1b", group=group)
    list(pipeline.run(batches()[:2]))
    own = sorted((i for i in pipeline.timeline().intervals if i.what in ("caller", "B")), key=lambda i: i.start)
    return [[i.what for i in own if i.rank == rank] for rank in range(2)]


@pytest.mark.processes
def test_only_the_last_stage_runs_its_last_backward_before_a_report(pool: Pool) -> None:
    """A stage whose backward has to wait for a gradient lets its caller work meanwhile."""
    first, last = pool.submit(callers_and_backwards, ranks=2)[0]
    assert first == ["caller", "B", "B"] * 2
    assert last == ["B", "B", "caller"] * 2
