"""Patience: when a run ends that becomes no better."""

from __future__ import annotations

import math

from penstock.train.setup.early_stopping import Patience, known_after


def test_patience_counts_a_version_once() -> None:
    """A run that goes on from a checkpoint finds again what it had found before it died."""
    patience = Patience(2)
    for version, loss in [(2, 1.0), (4, 2.0), (4, 2.0), (2, 1.0), (6, 0.5), (8, None)]:
        patience.record(version, loss)
        assert patience.end == math.inf
    for _ in range(2):
        patience.record(10, 0.6)
        assert patience.end == 16
    patience.record(12, 0.1)  # found while the run was ending
    assert patience.end == 16
    endless = Patience(None)
    endless.record(2, math.nan)
    assert endless.end == math.inf


def test_patience_leaves_time_for_what_is_under_way() -> None:
    """With one microbatch per batch, on 8 stages 7 batches are under way."""
    patience = Patience(1, known_after(8, 1))
    patience.record(2, None)
    assert patience.end == 2 + 6 + 7
