"""What is said of arguments that a command does not take, and how commands end."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from penstock import __version__
from penstock.cli import main
from support.command_line import run

COMMANDS = (
    "methods", "show", "simulate", "train", "sample", "config", "verify", "compare", "profile", "plan"
)  # fmt: skip
RUNS = ("train", "verify", "compare")
DRAWN = ("show", "simulate")
ALIKE = {  # what has one name and one form in all of these commands
    "--stages N": ("methods", *DRAWN, *RUNS),
    "--microbatches M": ("methods", *DRAWN, *RUNS, "plan"),
    "--batches T": ("show", "simulate", *RUNS),
    "--file FILE": (*DRAWN, *RUNS),
    "--data PATH": RUNS,
    "--set KEY=VALUE": RUNS,
    "--config,--plan FILE": RUNS,
    "--keys": RUNS,
    "--json": ("methods", *DRAWN, "verify", "compare", "profile", "plan"),
    "[METHOD]": (*DRAWN, *RUNS),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_speaks_one_dialect(command, columns, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, command, "--help", columns=columns)
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    assert not re.search(r"<\w+>", out), "a type stands for a value"
    words = " ".join(out.replace("│", " ").split())
    assert ("; --keys lists all keys" in words) == (command in RUNS)
    for option, commands in ALIKE.items():
        if command != "profile":  # with a file it takes other options than without
            assert (command in commands) == (option in words), option
    said = [line.strip() for line in out.splitlines() if re.match(r" \w", line)]
    divided = [one for one, two in pairwise(said) if len(one) + len(two.split()[0]) < columns - 4]
    assert [
        line for line in divided if not line.endswith((".", "first", "0.001", ".sbatch")) and "Usage" not in line
    ] == []


def test_without_arguments_it_lists_its_commands(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert all(f"│ {command} " in out for command in COMMANDS)
    assert run(monkeypatch, capsys, "-h") == (code, out, err)
    assert run(monkeypatch, capsys, "--version") == (0, f"penstock {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--lr", "1"], "error: there is no option --lr write --set optimizer.lr=..."),
        (["train", "--batch-size", "1"], "write --set microbatch_size=..."),
        (["train", "--every", "3"], "write --set checkpoint.every=... or --set evaluate.every=... or --set combine."),
        (["compare", "--spikes", "3"], "there is no option --spikes write --set spike=..."),
        (["train", "--stage", "3"], "there is no option --stage did you mean --stages?"),
        (["show", "--lr", "3"], "there is no option --lr penstock show --help lists what it takes"),
        (["train", "--foo-bar", "3"], "penstock train --help lists what it takes"),
        (["compare", "--methods", "1f1b,2bw"], "give methods without an option, as in penstock compare 2bw"),
        (["train", "--method", "1f1b"], "give methods without an option, as in penstock train 2bw"),
        (["train", "--schedule", "1f1b"], "give methods without an option, as in penstock train 2bw"),
        (["train", "1f1b", "2bw"], "error: got unexpected extra argument"),
        (["trian"], "error: no such command 'trian'. Did you mean 'train'?"),
        (["show", "2bw", "--stages", "x"], "error: invalid value for '--stages': "),
        (["show", "2bw", "--stages", "0"], "greater than or equal to 1, got '0'"),
        (["show", "2bw", "--stages", "4", "--stages", "0"], "greater than or equal to 1, got '0'"),
        (["plan", "mine.yaml"], "extra argument(s) (mine.yaml) write penstock plan --profile mine.yaml"),
        (["plan", "mine.yaml", "--profile=a.yaml"], "extra argument(s) (mine.yaml) penstock plan --help lists"),
        (["plan", "mine"], "error: got unexpected extra argument(s) (mine) penstock plan --help lists"),
        (["show", "2bw", "--stages=4.5"], ", got '4.5' penstock show --help lists what it takes"),
        (["show", "2bw", "--stages"], "error: option '--stages' requires an argument"),
        (["sample"], "error: missing argument 'FOLDER' penstock sample --help lists what it takes"),
    ],
)
def test_what_a_command_does_not_take(arguments, said, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "╭" not in err  # errors look alike, whoever finds them


def test_too_few_microbatches_are_told_in_the_words_of_users(monkeypatch, capsys):
    """Not in those of the proof, but for an order of one's own, which is written in them."""
    for command in ("show", "simulate", "train"):
        _, _, err = run(monkeypatch, capsys, command, "2bw", "--stages", 4, "--microbatches", 2)
        assert "2bw with 4 stages needs at least 3 microbatches per batch, got 2; raise microbatches to 3. (With" in err
        assert not re.search(r"STEP|\bt-\d|rule '", err)
    _, _, err = run(monkeypatch, capsys, "show", "chimera", "--microbatches", 1)
    assert err.endswith("needs at least 2 microbatches per batch, got 1; raise microbatches to 2\n")


def test_a_mistake_in_a_file_is_told_with_its_name(monkeypatch, capsys, tmp_path):
    """One of an option beside it is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("method: 2bw\nlr: 0.1\n")
    (tmp_path / "bad.yaml").write_text("method: [\n")
    for arguments, said in (
        (["--config", "mine.yaml"], "'mine.yaml': unknown configuration key 'lr'; did you mean 'optimizer.lr'?"),
        (["--config", "bad.yaml"], "'bad.yaml' is not YAML: line 2, column 1: expected the node content, but found "),
    ):
        assert run(monkeypatch, capsys, "train", *arguments)[2].startswith(f"error: {said}")
    for kind, said in (
        ("profile", "penstock plan --profile mine.yaml --devices N"),
        ("cluster", "--cluster mine.yaml"),
    ):
        (tmp_path / "mine.yaml").write_text(f"format: penstock {kind} 1\nname: a\n")
        for command in (["train", "--plan"], ["profile", "--rehearse", "0", "--plan"]):
            err = " ".join(run(monkeypatch, capsys, *command, "mine.yaml")[2].split())
            assert err.startswith(f"error: 'mine.yaml' is a {kind}")
            assert said in err
    (tmp_path / "mine.yaml").write_text("method: 2bw\n")
    _, _, err = run(monkeypatch, capsys, "train", "--config", "mine.yaml", "--set", "lr=1")
    assert err.startswith("error: unknown configuration key 'lr'")


def test_the_wrong_folder_is_told_with_the_right_one(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("1", "2"):
        (tmp_path / "runs" / name / "weights").mkdir(parents=True)
        (tmp_path / "runs" / name / "weights" / "index.json").write_text("{}")
    assert "the newest finished run in it is 'runs/2'" in run(monkeypatch, capsys, "sample", "runs")[2]
    (tmp_path / "file").write_text("")
    _, _, err = run(monkeypatch, capsys, "compare", "1f1b", "2bw", "--out", "file")
    assert err == "error: cannot write to --out 'file': it is a file; give a folder\n"


def test_ctrl_c_ends_a_command_without_a_word(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.view.tables.methods_table", interrupted)
    assert run(monkeypatch, capsys, "methods") == (130, "", "")


def test_ctrl_c_while_the_command_line_is_imported(monkeypatch, capsys):
    class Interrupted:
        """Stands for a module in the midst of whose import Ctrl-C comes."""

        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(__import__("sys").modules, "penstock.cli.app", Interrupted())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


def test_no_word_is_divided_in_a_terminal(monkeypatch, capsys):
    """Who reads the output gets a message on one line, but for the hint, which can be copied whole in both."""
    asked = ("train", "--set", "model.heads=5", "--set", "sample_length=0")
    _, _, piped = run(monkeypatch, capsys, *asked, columns=40)
    assert len(piped.splitlines()) == 1
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, _, shown = run(monkeypatch, capsys, *asked, columns=40)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", shown)
    lines = plain[plain.index("error:") :].splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == " ".join(piped.split())
