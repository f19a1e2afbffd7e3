"""PipeDream with vertical sync: every stage reads the version that the first stage read of the same microbatch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.cases import Case, assert_same, expected, train, train_on_ranks
from support.pool import Pool

GRID = [(1, 1), (2, 1), (2, 4), (3, 2), (4, 1), (4, 6), (6, 4)]


@pytest.mark.parametrize(("depth", "m"), GRID)
def test_vertical_sync_in_one_process(depth: int, m: int, device: str) -> None:
    case = Case("vertical-sync", depth, m, spans=(3, 5), device=device)
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("clip", [None, 0.6])
@pytest.mark.parametrize(("depth", "m"), [(2, 1), (2, 3), (4, 2)])
def test_vertical_sync_on_ranks(pool: Pool, depth: int, m: int, clip: float | None) -> None:
    case = Case("vertical-sync", depth, m, clip=clip)
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize(
    "changes",
    [{"recompute": "stage"}, {"recompute": "block"}, {"precision": "bf16"}, {"width": 2}, {"optimizer": "sgd"}],
    ids=str,
)
def test_vertical_sync_with_other_features(changes: dict[str, object]) -> None:
    case = replace(Case("vertical-sync", 3, 2, clip=0.6), **changes)  # type: ignore[arg-type]
    assert_same(train(None, case), expected(case))


def test_what_tells_it_from_stashing() -> None:
    """Stages behind the first one read older versions, so the numbers are others, but for one stage."""
    for depth, same in ((1, True), (3, False)):
        sync, stash = (expected(Case(method, depth, 2)) for method in ("vertical-sync", "stash"))
        assert (sync.reports == stash.reports) is same
