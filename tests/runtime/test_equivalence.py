"""The pipeline computes what the sequential reference computes, bit for bit."""

import pytest

from penstock.schedule.methods.table import METHODS as METHOD_TABLE
from penstock.verify.reference import METHODS as REFERENCES
from support.cases import METHODS, Case, assert_same, expected, together, train, train_on_ranks
from support.correction_cases import KINDS
from support.offered_methods import OFFERED
from support.order_cases import ORDERS
from support.own_methods import FILES
from support.pool import Pool
from support.smallest_batch import least

MORE = "3bw", "2bw-eager"  # the latter has the versions of 2bw: that its order is right is seen here, all else there
SHAPES = [(1, 1), (1, 3), (2, 1), (2, 5), (3, 2), (4, 3), (4, 6)]
GRID = [(method, d, m) for method in (*METHODS, *MORE) for d, m in SHAPES if m >= least(method, d)]
ON_RANKS = [(name, d, least(name, d) + more) for name in (*METHODS, *MORE) for d, more in [(2, 1), (3, 0), (4, 2)]]
ON_RANKS += [("1f1b", 1, 2), ("2bw", 1, 1), ("2bw", 2, 1), ("2bw", 4, 3), ("stash", 4, 1)]
OPTIMIZERS = ("sgd", "adamw", "nadam")


@pytest.mark.parametrize(("method", "depth", "m"), GRID)
def test_methods_in_one_process(method: str, depth: int, m: int, device: str) -> None:
    case = Case(method, depth, m, optimizer=OPTIMIZERS[(depth + m) % 3], device=device)
    assert_same(train(None, case), expected(case))


@pytest.mark.parametrize(("method", "depth", "m"), ON_RANKS)
def test_methods_on_ranks(pool: Pool, method: str, depth: int, m: int) -> None:
    """Every other case clips by the global norm."""
    clip = 0.6 if (depth + m) % 2 else None
    case = Case(method, depth, m, optimizer=OPTIMIZERS[(depth + m + 1) % 3], clip=clip)
    assert_same(train_on_ranks(pool, case), expected(case))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", [*METHODS, "3bw"])
def test_every_optimizer_with_every_method(method: str, optimizer: str) -> None:
    for depth, m in ((2, 1), (4, 3)):
        case = Case(method, depth, m, optimizer=optimizer, spans=(5,))
        assert_same(train(None, case), expected(case))


@pytest.mark.parametrize("members", [(1, 3), (0, 2, 3)])
def test_on_ranks_that_are_not_the_first(pool: Pool, members: tuple[int, ...]) -> None:
    """A rank of the pipeline is a place in its group, not in the job."""
    case = Case("2bw", len(members), 3)
    assert_same(together(pool.submit(train, case, ranks=members)), expected(case))


def test_every_method_has_a_reference_and_is_compared_somewhere() -> None:
    """The orders of the literature in test_orders_at_work.py; the others in test files of their own."""
    post = {row.name for row in METHOD_TABLE.values() if row.rule == "provisional"}
    late = {kind.method for kind in KINDS.values()} - FILES.keys()
    here = {*METHODS, *MORE, *ORDERS, "seq1f1b", "terapipe", *post, "vertical-sync", *late}
    assert METHOD_TABLE.keys() == set(REFERENCES) == here | (METHOD_TABLE.keys() - OFFERED.keys())
