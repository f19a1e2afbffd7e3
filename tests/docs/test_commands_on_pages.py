"""Every command in README and docs is one that the command line takes, and every file they name is there."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.train.config.load import load_config

pytestmark = pytest.mark.all_cases

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
_FOR = {"METHOD": "2bw", "N": "4", "M": "8", "KEY=VALUE": "seed=1"}
_STARTERS = r"(?:\$ |torchrun [^`\n]*?|mpirun [^`\n]*?|srun [^`\n]*?)?"


class ReachedError(Exception):
    """The command would now do its work."""


def commands_on(page: Path) -> Iterator[str]:
    """The commands on a page that say what to type, without comments, redirections and what starts them."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for kind, block in blocks if kind != "python" for line in block.splitlines()]
    lines += [
        " ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    ]
    lines += re.findall(r"^    (penstock .*)", text, re.MULTILINE)
    for line in lines:
        found = re.fullmatch(rf"{_STARTERS}(penstock \w.*)", line)
        if found:
            yield re.split(r" #| > ", found[1])[0].strip()


COMMANDS = sorted({(page.name, line) for page in PAGES for line in commands_on(page)})
WHOLE = [
    (page, line)
    for page, line in COMMANDS
    if "..." not in line and "[" not in line and not re.search(r"--(set|data|file|plan|resume|config|profile)$", line)
]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands stop where they would begin to work; configurations are read before that."""

    def reached(*_: Any, **__: Any) -> None:
        raise ReachedError

    def read(config: Any, changes: list[str], *_: Any, **__: Any) -> None:
        load_config(config, changes)
        raise ReachedError

    for place in (
        "penstock.cli.study_commands.prove_asked", "penstock.cli.compare._compare", "penstock.verify.verify.verify",
        "penstock.simulate.method_figures.facts_of_methods", "penstock.view.tables.facts_of_methods",
        "penstock.plan.profile.files.read_profile", "penstock.plan.profile.files.read_profile_text",
        "penstock.train.export.sample.sample_text", "penstock.plan.objectives.choose",
    ):  # fmt: skip
        monkeypatch.setattr(place, reached)
    monkeypatch.setattr("penstock.cli.plans.profile._measured", reached, raising=False)
    monkeypatch.setattr("penstock.measure.single_rank_rehearsal.rehearse", reached)
    monkeypatch.setattr("penstock.cli.train._checked", read)
    monkeypatch.chdir(tmp_path)
    for name in ("my_order.py", "endless.py", "broken.py", "examples/my_order.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text((ROOT / "examples" / "my_order.py").read_text())
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-methods.md").read_text(), re.DOTALL)
    Path("slow_start.py").write_text(blocks[3])
    shutil.copytree(ROOT / "examples" / "methods", "examples/methods")
    Path("plan.yaml").write_text("method: 2bw\n")


@pytest.mark.parametrize(("page", "line"), WHOLE)
def test_the_command_line_takes_what_pages_tell_to_type(
    page: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [_FOR.get(word, word) for word in shlex.split(line)]
    words += ["--help"] if len(words) == 2 else []  # the name of a command
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises((SystemExit, ReachedError)) as ended:
        main()
    assert ended.type is ReachedError or ended.value.code == 0, (page, capsys.readouterr().err)


def test_commands_were_found() -> None:
    """Of the README all, and of the other pages those in blocks, in the text, indented, and behind a launcher."""
    assert sum(page == "README.md" for page, _ in WHOLE) >= 7
    assert {
        ("own-methods.md", "penstock show --file examples/my_order.py:more=1 --stages 3 --microbatches 4"),
        ("start.md", "penstock verify 1f1b"),
        ("asynchronous.md", "penstock train pipemare --stages 8 --microbatches 8"),
        ("launchers.md", "penstock train 2bw --stages 8 --set out=/shared/runs"),
        ("README.md", "penstock compare 1f1b 2bw --out mine"),
    } <= set(WHOLE)
    assert len(WHOLE) > 80


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([\w./-]+\.(?:md|py|svg|toml|txt))`", text)) - _OF_A_USER
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link} - {""}
    assert [link for link in sorted(links) if not (page.parent / link).exists()] == []
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in FILES)] == []


FILES = [
    f"/{file.relative_to(ROOT)}"
    for top in ("docs", "src", "tests", "examples", "benchmarks", "tools", ".")
    for file in ((ROOT / top).rglob("*.*") if top != "." else ROOT.glob("*.*"))
]
_OF_A_USER = {
    "my_order.py", "endless.py", "broken.py", "slow_start.py", "my_script.py", "my.txt", "mine.txt", "random.py",
    "torch.py", "penstock.py",
}  # fmt: skip
