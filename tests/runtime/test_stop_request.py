"""A run over data without an end stops on all ranks after the same batch, whichever of them asks for it."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import DataError, Evaluating, Group, Pipeline, make_schedule
from support.pool import Pool

M, AT = 3, 2
MANY = 60  # batches that a run would train on if nobody heard of the request


class UserError(Exception):
    """What the body of a loop raises."""


def make_pipeline(method: str, depth: int, group: dist.ProcessGroup | None, **options: Any) -> Pipeline:
    torch.manual_seed(1)
    schedule = make_schedule(method, depth, 4 if method == "chimera" else M)
    widths = [3, *[5] * (2 * depth - 1), 2]
    return Pipeline(
        [nn.Linear(a, b) for a, b in itertools.pairwise(widths)],
        schedule,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9),
        group=Group(group, 20.0),
        **options,
    )


def endless(start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(start, MANY):
        generator = torch.Generator().manual_seed(number)
        yield torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def stopped_by(group: dist.ProcessGroup, method: str, who: int, how: str, evaluates: int, width: int = 1) -> Any:
    """What is reported until one rank ends the run, what is raised, what trained; and the weights after two more."""
    depth = dist.get_world_size(group) // width
    pipeline, reports, raised = make_pipeline(method, depth, group, data_parallel=width), [], ""
    evaluate = Evaluating(evaluates, lambda: list(endless(MANY - 2))) if evaluates else None
    try:
        for report in pipeline.run(endless(), evaluate=evaluate):
            reports.append(report.batch)
            if dist.get_rank(group) == who and report.batch == AT:
                if how == "raise":
                    raise UserError("of the loop")
                if how == "leave":
                    break
                pipeline.stop()
    except UserError as error:
        raised = str(error)
    trained = pipeline.batches
    more = [report.batch for report in pipeline.run(itertools.islice(endless(trained), 2))]
    assert more == [trained, trained + 1]
    return reports, raised, trained, {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


def check_stopped(found: list[Any], who: int, how: str, wanted: Pipeline, every: int, *, drained: bool) -> None:
    """All have ended a few batches later, with the weights of a run in one process over as many batches."""
    trained, weights = found[0][2], {}
    assert AT + 1 <= trained <= AT + 6
    for rank, (reports, raised, here, state) in enumerate(found):
        assert here == trained
        assert reports == list(range(AT + 1 if (rank, how) in ((who, "raise"), (who, "leave")) else trained))
        assert raised == ("of the loop" if (rank, how) == (who, "raise") else "")
        weights |= state
    evaluate = Evaluating(every, lambda: list(endless(MANY - 2))) if drained else None
    list(wanted.run(itertools.islice(endless(), trained), evaluate=evaluate))
    list(wanted.run(itertools.islice(endless(trained), 2)))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    ("method", "who", "how"),
    [
        ("1f1b", 1, "raise"),
        ("2bw", 2, "raise"),
        ("stash", 2, "leave"),
        ("zb-h1", 1, "stop"),
        ("gpipe", 2, "leave"),
        ("interleaved", 1, "raise"),
    ],
)
def test_any_rank_ends_a_run_where_nothing_is_decided_together(pool: Pool, method: str, who: int, how: str) -> None:
    """The request travels with the gradients to the rank that reads the data."""
    found = pool.submit(stopped_by, method, who, how, 0, ranks=3)
    wanted = make_pipeline(method, 3, None)
    assert not any(spec.op.value == "DECIDE" for program in wanted.schedule.programs for spec in program.period)
    check_stopped(found, who, how, wanted, 0, drained=False)


@pytest.mark.parametrize(
    ("method", "width", "who", "how"), [("2bw", 2, 3, "raise"), ("1f1b", 2, 1, "leave"), ("chimera", 1, 1, "raise")]
)
def test_any_rank_ends_a_run_where_several_ranks_read_data(
    pool: Pool, method: str, width: int, who: int, how: str
) -> None:
    """All stages decide together there, as each reads its own copy."""
    parallel = {"data_parallel": width} if width > 1 else {}
    found = pool.submit(stopped_by, method, who, how, 0, width, ranks=2 * width)
    check_stopped(found, who, how, make_pipeline(method, 2, None, **parallel), 0, drained=False)


@pytest.mark.parametrize(("how", "every"), [("leave", 1), ("raise", 2), ("stop", 3)])
@pytest.mark.parametrize("method", ["stash", "1f1b"])
def test_a_rank_ends_a_run_with_evaluations(pool: Pool, method: str, how: str, every: int) -> None:
    """Under stash the pipeline is drained for them, so a request may be made in the last batch before they begin."""
    found = pool.submit(stopped_by, method, 1, how, every, ranks=2)
    check_stopped(found, 1, how, make_pipeline(method, 2, None), every, drained=method == "stash")


def ends_apart(
    group: dist.ProcessGroup, method: str, width: int, who: int, count: int, longer: int, saves: int
) -> tuple[list[int], str, dict[str, Tensor]]:
    """What is reported and raised where the data of one rank end first; and the weights after two more batches."""
    depth = dist.get_world_size(group) // width
    pipeline, reports = make_pipeline(method, depth, group, data_parallel=width), []
    evaluate = Evaluating(saves, lambda: list(endless(MANY - 2))) if saves else None
    here = itertools.islice(endless(), count + longer * (dist.get_rank(group) != who))
    with pytest.raises(DataError) as caught:  # noqa: PT012
        for report in pipeline.run(here, evaluate=evaluate):
            reports.append(report.batch)
    list(pipeline.run(itertools.islice(endless(count), 2)))
    return reports, str(caught.value), {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "ranks", "width", "who", "count", "longer", "saves"),
    [
        ("1f1b", 2, 1, 1, 4, 1, 0),
        ("2bw", 3, 1, 2, 1, 9, 0),  # before a rank would look further ahead
        ("2bw", 3, 1, 0, 5, 1, 0),
        ("stash", 2, 1, 1, 5, 3, 2),  # in spans, whose data end where those of the run go on
        ("stash", 2, 1, 1, 4, 3, 2),  # with a span
        ("stash", 2, 1, 0, 4, 3, 2),
        ("zb-h1", 3, 1, 2, 6, 1, 0),
        ("interleaved", 2, 1, 1, 3, 2, 0),
        ("chimera", 2, 1, 0, 4, 2, 0),
        ("chimera", 2, 1, 1, 4, 1, 0),
        ("2bw", 4, 2, 3, 5, 1, 0),
        ("1f1b", 4, 2, 0, 3, 4, 0),
    ],
)
def test_data_that_end_first_on_any_rank_end_the_run_on_all(
    pool: Pool, method: str, ranks: int, width: int, who: int, count: int, longer: int, saves: int
) -> None:
    """Every batch that all have is trained on, and the pipeline goes on."""
    found = pool.submit(ends_apart, method, width, who, count, longer, saves, ranks=ranks)
    weights: dict[str, Tensor] = {}
    for reports, said, state in found:
        assert reports == list(range(count))
        assert re.search(rf"the data have ended on rank {who}, but not on rank|rank {who} has no batch, but", said)
        weights |= state
    wanted = make_pipeline(method, ranks // width, None, data_parallel=width)
    evaluate = Evaluating(saves, lambda: list(endless(MANY - 2))) if saves else None
    list(wanted.run(itertools.islice(endless(), count), evaluate=evaluate))
    list(wanted.run(itertools.islice(endless(count), 2)))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(weights[name], tensor), name


def notices(group: dist.ProcessGroup, method: str, who: int, how: str) -> tuple[list[str], list[str], int]:
    """What this rank logs as a warning and as information in a run that one rank ends, and the batches trained."""
    found: dict[int, list[str]] = {logging.WARNING: [], logging.INFO: []}
    handler, logger = logging.Handler(), logging.getLogger("penstock")
    handler.emit = lambda record: found[record.levelno].append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        if how == "all leave":
            pipeline = make_pipeline(method, dist.get_world_size(group), group)
            next(report for report in pipeline.run(endless()) if report.batch == AT)
            trained = pipeline.batches
        else:
            trained = stopped_by(group, method, who, how, 0)[2]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return found[logging.WARNING], found[logging.INFO], trained


@pytest.mark.parametrize(("method", "who"), [("1f1b", 2), ("2bw", 0), ("stash", 1)])
def test_it_is_said_which_rank_left_and_when(pool: Pool, method: str, who: int) -> None:
    """The first of the other ranks warns; the rest only inform, so that a large job is not flooded."""
    found = pool.submit(notices, method, who, "leave", ranks=3)
    trained = found[0][2]
    said = f"rank {who} left the loop after the report of batch {AT}, so the run ends after batch {trained - 1} on all "
    first = 1 if who == 0 else 0
    for rank, (warnings, information, _) in enumerate(found):
        texts = {who: ([], [])}.get(rank, ([said], []) if rank == first else ([], [said]))
        for texts_wanted, lines in zip(texts, (warnings, information), strict=True):
            assert len(lines) == len(texts_wanted), (rank, lines)
            assert all(line.startswith(text) for line, text in zip(lines, texts_wanted, strict=True))


@pytest.mark.parametrize(("who", "how"), [(1, "stop"), (-1, "all leave")])
def test_no_rank_warns_where_all_leave_or_one_asks_for_the_end(pool: Pool, who: int, how: str) -> None:
    for warnings, *_ in pool.submit(notices, "2bw", who, how, ranks=2):
        assert warnings == []
