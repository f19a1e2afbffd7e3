"""The short form of `make fuzz`: random malformed inputs end with documented errors, and soon."""

from __future__ import annotations

import pytest

from campaigns.fuzz import Findings, edited, fuzz, report
from penstock.errors import ConfigError


@pytest.mark.slow
def test_nothing_but_documented_errors() -> None:
    findings = fuzz(300, start=1)
    assert findings.tried.total() >= 300
    assert not findings.found, report(findings)


def test_the_campaign_sees_what_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("campaigns.fuzz.LIMIT", 0.1)
    findings = Findings()

    def refuse() -> None:
        raise ConfigError("no")

    def hang() -> None:
        while True:
            pass

    findings.attempt("a reader", refuse, 1)
    assert not findings.found
    findings.attempt("a reader", lambda: 1 // 0, "\udcff")
    findings.attempt("a reader", hang, 1)
    assert dict(findings.found) == {"a reader: ZeroDivisionError in ?": 1, "a reader: TooLongError in ?": 1}
    assert "3 inputs, 2 findings at 2 places" in report(findings)
    summary = findings.summary()
    assert summary["inputs"] == {"a reader": 3}
    assert summary["longest_seconds"] >= 0.1


def test_inputs_are_edited_in_every_way() -> None:
    changes = [
        ("replace", 0, 0, "x"),
        ("insert", 1, 0, "y"),
        ("remove", 2, 0, ""),
        ("swap", 0, 1, ""),
        ("repeat", 1, 1, ""),
    ]
    assert edited("a b c", changes, " ") == "y x c x c"
