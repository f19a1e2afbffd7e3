"""What a newcomer sees first: the README's code, the example, the public names."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_code_in_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code) == 2
    monkeypatch.chdir(tmp_path)
    batches = [[(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)] for _ in range(3)]
    exec(compile(code[0], "README.md", "exec"), {"blocks": [nn.Linear(4, 4), nn.Linear(4, 1)], "batches": batches})
    assert (tmp_path / "trace.json").stat().st_size > 1000


def test_the_example_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = (ROOT / "examples" / "any_blocks.py").read_text()
    assert len(source.splitlines()) <= 60
    short = tmp_path / "any_blocks.py"
    short.write_text(source.replace("= 4, 8, 16, 60", "= 4, 8, 16, 40"))
    runpy.run_path(str(short))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 4  # two methods, at batches 20 and 40
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]


def test_every_public_name_is_there_and_described() -> None:
    for name in penstock.__all__:
        thing = getattr(penstock, name)
        assert thing.__doc__, name
    assert set(penstock.__all__) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = penstock.nothing


def test_schedules_need_no_torch() -> None:
    code = (
        "import sys, penstock\n"
        "schedule = penstock.make_schedule('2bw', 4, 4)\n"
        "penstock.simulate_schedule(schedule, penstock.Costs.uniform(schedule))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert targets == {"train", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_files_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.(?:md|py))`", README)) | set(re.findall(r"\]\(([^)]+)\)", README))
    assert {"docs/design.md", "docs/2bw.svg"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == ["my_script.py"] * ("my_script.py" in named)
