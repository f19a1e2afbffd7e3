"""Published profiles, which are not part of the repository: beside it, in ../shared/data/profiles."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.plan.profile.other_programs import from_pipedream, from_piper
from penstock.plan.profile.schema import Profile

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "profiles"


def answers() -> Any:
    """What the published programs answer; the test is skipped if the files are not there."""
    if not (FOLDER / "answers.json").is_file():
        pytest.skip(f"published profiles are not part of the repository; they are looked for in {FOLDER}")
    return json.loads((FOLDER / "answers.json").read_text())


@cache
def published(program: str, name: str) -> Profile:
    """A published profile, converted."""
    read, ending = (from_pipedream, "graph.txt") if program == "pipedream" else (from_piper, "json")
    return read((FOLDER / program / f"{name}.{ending}").read_text(), name)
