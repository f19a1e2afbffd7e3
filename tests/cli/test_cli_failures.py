"""What is said of arguments that a command does not take, and how commands end."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from penstock import __version__
from penstock.cli import main
from support.command_line import run

COMMANDS = ("methods", "show", "simulate", "train", "sample", "config", "verify", "compare")
ALIKE = {  # what has one name and one form in all of these commands
    "--stages N": ("methods", "show", "simulate", "train", "verify", "compare"),
    "--microbatches M": ("methods", "show", "simulate", "train", "verify", "compare"),
    "--batches T": ("simulate", "train", "verify", "compare"),
    "--file FILE": ("show", "simulate", "train", "verify", "compare"),
    "--data PATH": ("train", "verify", "compare"),
    "--set KEY=VALUE": ("train", "verify", "compare"),
    "--config,--plan FILE": ("train", "verify", "compare"),
    "--keys": ("train", "verify", "compare"),
    "--json": ("methods", "show", "simulate", "verify", "compare"),
    "[METHOD]": ("show", "simulate", "train", "verify", "compare"),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_speaks_one_dialect(command, columns, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, command, "--help", columns=columns)
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.replace("│", " ").split())
    for option, commands in ALIKE.items():
        assert (command in commands) == (option in words), option
    said = [line.strip() for line in out.splitlines() if re.match(r" \w", line)]
    divided = [one for one, two in pairwise(said) if len(one) + len(two.split()[0]) < columns - 4]
    assert [line for line in divided if not line.endswith((".", "first", "0.001")) and "Usage" not in line] == []


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
        (["verify", "--learning-rate", "1"], "error: there is no option --learning-rate write --set optimizer.lr=..."),
        (["train", "--epochs", "1"], "error: there is no option --epochs write --batches ..."),
        (["train", "--batch-size", "1"], "write --set microbatch_size=..."),
        (["train", "--every", "3"], "write --set checkpoint.every=... or --set evaluate.every=... or --set combine."),
        (["compare", "--spikes", "3"], "there is no option --spikes write --set spike=..."),
        (["train", "--stage", "3"], "there is no option --stage did you mean --stages?"),
        (["show", "--lr", "3"], "there is no option --lr penstock show --help lists what it takes"),
        (["train", "--foo-bar", "3"], "penstock train --help lists what it takes"),
        (["compare", "--methods", "1f1b,2bw"], "give methods without an option, as in penstock compare 2bw"),
        (["train", "--method", "1f1b"], "give methods without an option, as in penstock train 2bw"),
        (["train", "1f1b", "2bw"], "error: got unexpected extra argument"),
        (["trian"], "error: no such command 'trian'. Did you mean 'train'?"),
        (["show", "2bw", "--stages", "x"], "error: invalid value for '--stages': "),
        (["show", "2bw", "--stages"], "error: option '--stages' requires an argument"),
        (["sample"], "error: missing argument 'FOLDER' penstock sample --help lists what it takes"),
    ],
)
def test_what_a_command_does_not_take(arguments, said, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert "╭" not in err  # errors look alike, whoever finds them


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
