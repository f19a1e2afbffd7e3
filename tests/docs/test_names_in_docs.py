"""Paths of modules and dotted names in pages and docstrings stand for something that exists."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SOURCES = sorted((ROOT / "src" / "penstock").rglob("*.py"))


def missing_paths(text: str) -> list[str]:
    """The modules that a text names by their path, from the root or from src/penstock, and that are not there."""
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.py)`", text)
    return [path for path in named if not (ROOT / path).is_file() and not (ROOT / "src" / "penstock" / path).is_file()]


def unknown_names(text: str) -> list[str]:
    """The dotted names below penstock that are neither modules nor named in the module that they begin with."""
    found = []
    for name in re.findall(r"`(penstock(?:\.\w+)+)", text):
        place, rest = ROOT / "src", name.split(".")
        while rest and (place / rest[0]).is_dir():
            place /= rest.pop(0)
        if rest and (place / f"{rest[0]}.py").is_file():
            place = place / f"{rest.pop(0)}.py"
        else:
            place /= "__init__.pyi" if name.count(".") == 1 else "__init__.py"
        if not all(re.search(rf"\b{part}\b", place.read_text()) for part in rest):
            found.append(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_modules_that_exist(page: Path) -> None:
    assert (missing_paths(page.read_text()), unknown_names(page.read_text())) == ([], [])


def test_docstrings_name_modules_that_exist() -> None:
    found = {str(path.relative_to(ROOT)): unknown_names(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_what_does_not_exist_is_found() -> None:
    assert find_spec("penstock.schedule.text_parser") is not None
    text = "`schedule/text_parser.py`, `schedule/gone.py`, `tests/conftest.py`, "
    text += "`penstock.schedule.text_parser.parse_schedule`, "
    text += "`penstock.schedule.text_parser.gone`, `penstock.schedule.gone`, `penstock.Pipeline`, `penstock.Gone`"
    assert missing_paths(text) == ["schedule/gone.py"]
    assert unknown_names(text) == ["penstock.schedule.text_parser.gone", "penstock.schedule.gone", "penstock.Gone"]
