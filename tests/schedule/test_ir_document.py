"""docs/ir.md argues from the golden files; it must show them as they are."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "ir.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("*.txt")), ids=lambda path: path.stem)
def test_the_document_shows_every_golden_file_verbatim(path):
    assert f"```text\n{path.read_text()}```" in DOCUMENT
