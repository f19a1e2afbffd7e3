"""What counts as a divergence, and that all ranks hear of it in time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError
from penstock.options.updates import Divergence
from penstock.runtime.update.divergence import DivergenceDetector, Trouble
from penstock.train.setup.early_stopping import known_after
from penstock.weights.decision import Decision
from support.cases import (
    VOCABULARY,
    Case,
    make_batches,
    make_pipeline,
    token_loss,
)
from support.phases import case_of, schedule
from support.pool import Pool

LOOKING = Divergence(spike=2.0, window=3)


def decision(batch: int, loss: float, finite: bool = True, weight: float = 1.0) -> Decision:
    return Decision(batch, loss, weight, 1.0, 1.0, finite, 1.0)


@pytest.mark.parametrize(
    ("losses", "trouble"),
    [
        ([3, 3, 3, 5.9, 6], None),
        ([3, 3, 3, 6.1, 1], 3),
        ([9, 1, 9, 3], None),
        ([1, 1, 9], None),
        ([1, math.nan, 1], 1),
        ([1, 1, 1, 1, math.inf], 4),
    ],
)
def test_what_is_a_divergence(losses: list[float], trouble: int | None) -> None:
    detector = DivergenceDetector(LOOKING, scaled=False)
    detector.watch_from(0)
    for t, loss in enumerate(losses):
        detector.observe(decision(t, loss))
    assert (detector.trouble and detector.trouble.batch) == trouble


def test_an_overflow_under_a_loss_scale_is_none() -> None:
    for scaled in (False, True):
        detector = DivergenceDetector(LOOKING, scaled)
        detector.watch_from(0)
        detector.observe(decision(0, 1.0, finite=False))
        detector.observe(decision(1, math.nan, weight=0.0))  # a batch of nothing
        assert (detector.trouble is None) == scaled


def test_a_lookout_remembers_what_a_snapshot_holds() -> None:
    losses = [1, 1, 2, 1, 3, 1, 9, 1]
    whole = DivergenceDetector(LOOKING, scaled=False)
    whole.watch_from(4)
    for t, loss in enumerate(losses):
        other = DivergenceDetector(LOOKING, scaled=False)
        other.load(whole.state())
        other.watch_from(4)
        for later in range(t, len(losses)):
            other.observe(decision(later, losses[later]))
        whole.observe(decision(t, loss))
        assert other.trouble == Trouble(4, "the loss was 3, 3 times the median of the 3 batches before")
    whole.watch_from(5)
    assert whole.trouble is None


def poisoned_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Not a number where the first target says so."""
    total, weight = token_loss(logits, targets.clamp(max=VOCABULARY - 1))
    return total * (math.nan if targets[0, 0] == VOCABULARY else 1.0), weight


def watch(group: dist.ProcessGroup | None, case: Case) -> tuple[Trouble | None, int, bool]:
    """Train, and let any rank that hears of trouble end the run."""
    pipeline = make_pipeline(case, group, loss=poisoned_loss, divergence=Divergence())
    pipeline.look_out()
    for _ in pipeline.run(make_batches(case)):
        if pipeline.trouble is not None:
            pipeline.stop()
    pipeline.switch(schedule(case, "1f1b"))
    list(pipeline.run(make_batches(case)[pipeline.batches :]))
    return pipeline.trouble, pipeline.batches, pipeline.is_finite()


def test_all_ranks_hear_of_the_same_trouble(pool: Pool) -> None:
    case = case_of([("2bw", 12)], 2, 2, spikes=(3,), clip=1.0)
    found = (Trouble(3, "the loss was nan"), 12, True)
    assert watch(None, case) == found
    assert pool.submit(watch, case, ranks=2) == [found, found]


@pytest.mark.parametrize(
    ("method", "depth", "m", "more"),
    [
        ("1f1b", 4, 2, 0),
        ("gpipe", 2, 1, 0),
        ("2bw", 4, 3, 0),
        ("2bw-eager", 4, 6, 0),
        ("stash", 4, 1, 0),
        ("vertical-sync", 3, 1, 0),
        ("stash", 2, 1, 11),
        ("vertical-sync", 3, 2, 9),
    ],
)
def test_whoever_reads_data_hears_of_trouble_in_time(method: str, depth: int, m: int, more: int) -> None:
    """So that a run may end before the same batch everywhere: on the first and the last stage."""
    options = (("in_flight", depth + more),) if more else ()
    case = case_of([(method, 24)], depth, m, spikes=(3,), clip=1.0, options=options)
    pipeline, heard = make_pipeline(case, loss=poisoned_loss, divergence=Divergence()), []
    pipeline.look_out()
    limit = 3 + known_after(depth + more, m)

    def data() -> Iterator[Any]:
        for number, batch in enumerate(make_batches(case)):
            troubles = [pipeline._ranks[rank].decisions.detector.trouble for rank in (0, depth - 1)]
            if all(trouble is not None and trouble.batch == 3 for trouble in troubles):
                heard.append(number)
            yield batch

    list(pipeline.run(data()))
    assert heard == list(range(heard[0], 24))
    assert 3 < heard[0] <= limit


def test_divergence_needs_stages_that_decide_together() -> None:
    case = case_of([("2bw", 2)], 2, 2)
    with pytest.raises(ConfigError, match="set max_grad_norm"):
        make_pipeline(case, divergence=Divergence())
    with pytest.raises(ConfigError, match="spike must be above 1"):
        make_pipeline(replace(case, clip=1.0), divergence=Divergence(spike=0.5))
