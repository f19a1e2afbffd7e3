"""`penstock verify` of orders of one's own: against the equations of their rule, and it sees what is planted."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.train.config.load import load_config
from penstock.verify import config_to_reference
from penstock.verify.report import Verification
from penstock.verify.verify import TOLERANCE, verify

TINY = (
    "microbatch_size=1", "model.layers=2", "model.width=16", "model.heads=2", "model.context=8",
    "lr_schedule.warm_up=2", "optimizer.lr=0.01", "threads=1", "max_grad_norm=null",
)  # fmt: skip
LAST_FIRST = """
def order(stages, microbatches):
    forwards = [f"F{k}" for k in range(microbatches)]
    return [forwards + [f"B{k}" for k in reversed(range(microbatches))]] * stages
"""


def verified(folder: Path, schedule: Path, *changes: str, count: int = 4) -> Verification:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    own = [f"data={folder / 'text.txt'}", f"schedule={schedule}"]
    return verify(load_config(None, [*TINY, *own, *changes]), count)


@pytest.mark.parametrize(
    ("method", "microbatches"),
    [
        ("1f1b", 3),
        ("zb-v", 4),
        ("chimera", 4),
        ("zb-h2-post", 4),
        ("2bw", 3),
        ("stash", 1),
        ("vertical-sync", 3),
        ("newest", 2),
        ("timeprest", 2),
    ],
)
def test_every_rule_without_a_correction_has_a_reference(method: str, microbatches: int, tmp_path: Path) -> None:
    """As text, which says nothing of the method; delays of other orders than 1F1B's are derived from them."""
    penstock.make_schedule(method, 2, microbatches).save(tmp_path / "mine.txt")
    found = verified(tmp_path, tmp_path / "mine.txt")
    assert found.agrees, found.verdict
    assert max(row.reference.tolerance for row in found.rows) == 0
    assert f"the pipeline trains what {method} says" in found.verdict


def test_delays_are_those_of_the_order_itself(tmp_path: Path) -> None:
    """Here the second forward of a batch on rank 0 comes before an update, which it follows in 1F1B."""
    passes = "rank 0: F0 F1 B-1 B0\nrank 1: F0 B0 F1 B1\ndrain 0: B-1\n"
    path = tmp_path / "mine.txt"
    path.write_text(f"schedule mine\nrule stash\nmicrobatches 2\nnodes 0@0 1@1\n{passes}")
    assert "rank 0: F0^t-1 F1^t-1 B-1^t-2 STEP[t-1] B0^t-1" in str(penstock.load_schedule(path))
    assert "rank 0: F0^t-1 B-1^t-1 STEP[t-1] F1^t B0^t-1" in str(penstock.make_schedule("stash", 2, 2))
    found = verified(tmp_path, path)
    assert found.agrees, found.verdict


def test_sums_in_another_order_are_allowed_to_round(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LAST_FIRST)
    found = verified(tmp_path, tmp_path / "mine.py", "microbatches=5", "max_grad_norm=0.5")
    assert found.agrees, found.verdict
    assert {row.reference.tolerance for row in found.rows} == {TOLERANCE}
    assert any(row.reference.differing == 0 and row.reference.worst is not None for row in found.rows)


def test_a_rule_without_a_reference_is_refused(tmp_path: Path) -> None:
    penstock.make_schedule("zb-h2", 2, 4, rule="provisional-in-place").save(tmp_path / "mine.txt")
    with pytest.raises(
        ConfigError, match="no reference for orders of your own under rule 'provisional-in-place'; there is one for"
    ):
        verified(tmp_path, tmp_path / "mine.txt")


def test_what_is_wrong_with_an_order_of_ones_own_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the equations of another rule stand for a pipeline that does not do what its schedule says."""
    penstock.make_schedule("2bw", 2, 3).save(tmp_path / "mine.txt")
    monkeypatch.setattr(config_to_reference, "BY_RULE", {"double-buffer": "1f1b"})
    found = verified(tmp_path, tmp_path / "mine.txt")
    assert not found.agrees
    assert "the pipeline does not train what 2bw says: it differs first in batch 1" in found.verdict
