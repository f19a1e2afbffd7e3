"""Published figures about time, memory and scale: each within its tolerance, and the table of docs/scaling.md."""

import re

import pytest

from support.published_cases import PAGE, cases, row_of

CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_published_figure(case):
    if case.obtained is None:
        assert case.open
        assert case.why
        return
    close = case.obtained() == pytest.approx(case.expected, rel=case.tolerance)
    assert close != case.open, row_of(case)
    assert case.why or not case.open


def test_published_figures_are_told_apart():
    names = [case.what for case in CASES]
    assert len(set(names)) == len(names)
    assert len(names) > 80


def test_the_page_has_the_table_of_published_figures():
    """Words to the letter, numbers as they are computed here."""
    (text,) = re.findall(r"<!-- published -->\n(.*?)<!-- end of published -->", PAGE.read_text(), re.DOTALL)
    assert text.splitlines()[2:] == [row_of(case) for case in CASES]
