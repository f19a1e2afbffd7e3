"""However many microbatches are in flight, double buffering trains the same bits; other rules what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.train.config.load import load_config
from penstock.verify.verify import verify
from support.cases import Case, assert_same, expected, train, train_on_ranks
from support.pool import Pool

TINY = (
    "microbatch_size=1", "model.layers=3", "model.width=16", "model.heads=2", "model.context=8",
    "lr_schedule.warm_up=2", "optimizer.lr=0.01", "threads=1", "stages=3", "microbatches=4",
)  # fmt: skip


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
@pytest.mark.parametrize("numbers", [(1, 1, 1), (2, 2, 1), (4, 4, 1), (5, 3, 1)])
def test_the_bits_do_not_depend_on_it(method: str, numbers: tuple[int, ...]) -> None:
    case = Case(method, 3, 4, model="restless", clip=0.6, spans=(4, 3))
    assert_same(train(None, replace(case, options=(("in_flight", numbers),))), expected(case))


def test_the_bits_do_not_depend_on_it_between_processes(pool: Pool) -> None:
    case = Case("2bw", 2, 3, clip=0.6, spans=(4,))
    for number in (1, 2, 4):
        assert_same(train_on_ranks(pool, replace(case, options=(("in_flight", number),))), expected(case))


@pytest.mark.parametrize("method", ["stash", "newest", "spectrain", "xpipe"])
@pytest.mark.parametrize("numbers", ["6", "5/5/2"])
def test_rules_whose_delay_grows_train_what_their_equations_say(method: str, numbers: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    found = verify(
        load_config(None, [*TINY, f"data={tmp_path / 'text.txt'}", f"method={method}:in_flight={numbers}"]), 4
    )
    assert found.agrees, found.verdict
    assert max(row.reference.tolerance for row in found.rows) == 0
