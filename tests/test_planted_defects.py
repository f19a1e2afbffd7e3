"""The defects of `make planted` have their places in the source, so that the campaign does not rot."""

from collections import Counter
from pathlib import Path

import pytest

from campaigns.defects import DEFECTS, Defect
from campaigns.planted_defects import ROOT, chosen, place_of

pytestmark = pytest.mark.all_cases


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_every_planted_defect_has_its_place(defect):
    place = place_of(defect)
    compile(place.text, str(place.file), "exec")
    assert defect.new not in ("", defect.old)
    assert defect.tests
    assert all((ROOT / test).exists() for test in defect.tests)


def test_defects_are_planted_everywhere():
    counts = Counter(defect.folder.split("/")[0] for defect in DEFECTS)
    assert len(DEFECTS) == len({defect.what for defect in DEFECTS}) >= 40
    for folder in ("schedule", "simulate", "weights", "comm", "stage", "runtime", "checkpoint", "train", "verify"):
        assert counts[folder] >= 3, folder


def test_defects_are_chosen_by_number_and_by_folder():
    assert [number for number, _ in chosen([])] == list(range(len(DEFECTS)))
    assert [number for number, _ in chosen(["3", "5"])] == [3, 5]
    assert {defect.folder.split("/")[0] for _, defect in chosen(["comm", "stage"])} == {"comm", "stage"}


def test_a_place_that_is_gone_or_not_the_only_one_is_told(tmp_path: Path):
    defect = Defect("a sign is wrong", "weights", "a + b", "a - b", ())
    (tmp_path / "weights").mkdir()
    for texts, said in ([], "no file, 0 times"), (["a + b", "a + b"], "x0.py, weights/x1.py, 2 times"):
        for number, text in enumerate(texts):
            (tmp_path / "weights" / f"x{number}.py").write_text(text)
        with pytest.raises(LookupError, match=said):
            place_of(defect, tmp_path)
    (tmp_path / "weights" / "x1.py").write_text("c = a + b")
    (tmp_path / "weights" / "x0.py").unlink()
    assert place_of(defect, tmp_path) == (Path("weights/x1.py"), "c = a - b")
