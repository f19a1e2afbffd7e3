"""Published figures about time, memory and planning: each within its tolerance, and docs/published-figures.md."""

import re

import pytest

from support.published_cases import PAGE, groups, row_of

GROUPS = groups()
CASES = [case for cases in GROUPS.values() for case in cases]


def rows_of(group):
    """The rows of a table of the page."""
    (text,) = re.findall(rf"<!-- published {group} -->\n(.*?)<!-- end of {group} -->", PAGE.read_text(), re.DOTALL)
    return text.splitlines()[2:]


ROWS = {row for group in GROUPS for row in rows_of(group)}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * case.long, id=case.what) for case in CASES]
)
def test_published_figure(case):
    """It is as close as it should be, or known not to be; and the page says what is computed here."""
    assert row_of(case) in ROWS, row_of(case)
    assert case.why or not case.open
    if case.obtained is None:
        assert case.open
        return
    close = case.obtained() == pytest.approx(case.expected, rel=case.tolerance)
    assert close != case.open, row_of(case)


def test_published_figures_are_told_apart():
    names = [case.what for case in CASES]
    assert len(set(names)) == len(names)
    assert len(names) > 180


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_has_the_table_of_published_figures(group):
    """Every figure, in order; what it says is compared with the figures one by one."""
    assert [row.split(" | ")[0] for row in rows_of(group)] == [f"| {case.what}" for case in GROUPS[group]]
