"""Small defects planted in copies of the source, one after the other: `make planted` says which of them tests notice.

    PYTHONPATH=tests python -m campaigns.planted_defects                    # all of them, about half an hour
    PYTHONPATH=tests python -m campaigns.planted_defects --only comm stage  # those of some folders
    PYTHONPATH=tests python -m campaigns.planted_defects --only 17 30       # those with these numbers

The source itself is never touched: each defect is planted in a copy in a temporary folder, and the tests run on that.
A defect that no test notices shows a property that nobody holds the code to.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from campaigns.defects import DEFECTS, Defect

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
PATIENCE = 900.0  # seconds for the tests of one defect; a pipeline that hangs is noticed as well


class Place(NamedTuple):
    """Where a defect goes: a file below src/penstock, and its text with the defect."""

    file: Path
    text: str


def place_of(defect: Defect, source: Path = SOURCE) -> Place:
    """Find the one place of a defect.

    Raises:
        LookupError: the old text does not stand exactly once in the folder; the message says what to do.
    """
    files = sorted((source / defect.folder).rglob("*.py"))
    found = [(path, text) for path in files for text in [path.read_text()] if defect.old in text]
    if len(found) != 1 or found[0][1].count(defect.old) != 1:
        where = ", ".join(str(path.relative_to(source)) for path, _ in found) or "no file"
        raise LookupError(
            f"{defect.what}: its old text must stand once in src/penstock/{defect.folder}, but it stands in {where}, "
            f"{sum(text.count(defect.old) for _, text in found)} times; correct tests/campaigns/defects.py"
        )
    path, text = found[0]
    return Place(path.relative_to(source), text.replace(defect.old, defect.new))


def try_out(defect: Defect, folder: Path) -> str | None:
    """Plant a defect in a copy of the source and run its tests on that.

    Args:
        defect: which.
        folder: an empty one, for the copy.

    Returns:
        The test that fails, or "no end" where the tests hang; None if all of them pass.

    Raises:
        RuntimeError: the test fails without the defect, too, or there is no result.
    """
    place = place_of(defect)
    copy = folder / "src" / "penstock"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / place.file).write_text(place.text)
    try:
        failed = first_failure(defect.tests, copy.parent)
    except subprocess.TimeoutExpired:
        return f"no end within {PATIENCE:g} seconds"
    if failed is not None and first_failure([failed], SOURCE.parent) is not None:
        raise RuntimeError(f"{failed} fails without the defect, too")
    return failed


def first_failure(tests: Sequence[str], source: Path) -> str | None:
    """Run tests on a copy of the source until one fails; returns its name, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    if ran.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::\w+(?:\[.*?\])?)?)(?: - .*)?$", ran.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest ended with exit code {ran.returncode}:\n{ran.stdout}{ran.stderr}")
    return found[1]


def chosen(only: Sequence[str]) -> Iterator[tuple[int, Defect]]:
    """The defects with these numbers, or in these folders; all if none is named."""
    for number, defect in enumerate(DEFECTS):
        if not only or str(number) in only or any(defect.folder.split("/")[0] == name for name in only):
            yield number, defect


def say(text: str) -> None:
    """Print a line at once, so that one can watch."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Plant defects one after the other; the exit code is 1 if one of them is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="numbers of defects, or folders of src/penstock")
    arguments = parser.parse_args()
    counts = Counter[str]()
    for number, defect in chosen(arguments.only):
        try:
            with tempfile.TemporaryDirectory(prefix="planted-") as folder:
                failed = try_out(defect, Path(folder))
        except (LookupError, RuntimeError) as error:
            verdict, said = "NO RESULT", str(error)
        else:
            verdict, said = ("NOT NOTICED", ", ".join(defect.tests)) if failed is None else ("noticed", failed)
        counts[verdict] += 1
        say(f"{number:3} {verdict:12} {defect.folder}: {defect.what}\n{'':16} {said}")
    say(", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items()))
    return 0 if counts.keys() <= {"noticed"} else 1


if __name__ == "__main__":
    sys.exit(main())
