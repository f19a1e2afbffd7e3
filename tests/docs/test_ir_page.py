"""docs/ir.md argues from the golden files; it must show them as they are."""

from pathlib import Path

import pytest

from support.schedules import make_schedule

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "ir.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("*.txt")), ids=lambda path: path.stem)
def test_the_document_shows_every_golden_file_verbatim(path):
    assert f"```text\n{path.read_text()}```" in DOCUMENT


def test_the_first_example_is_2bw_itself():
    assert f"```text\n{make_schedule('2bw', 3, 3)}```" in DOCUMENT
