"""What docs/asynchronous.md says that methods need is what they are refused without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from penstock.errors import PenstockError
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.table import METHODS
from penstock.train.config.load import load_config
from penstock.train.prepare.prepare_run import prepare
from penstock.verify.reference import predictions
from support.offered_methods import OFFERED

PAGE = (Path(__file__).parents[2] / "docs/asynchronous.md").read_text()
ROWS = re.findall(r"^\| (`[^|]*) \|(?:[^|]*\|){4}([^|]*)\|$", PAGE, re.MULTILINE)
NEEDS = {name: needs.strip() for names, needs in ROWS for name in re.findall(r"`([\w-]+)`", names)}
OTHERS = {
    "optimizer.name": "adamw", "optimizer.nesterov": "true", "optimizer.weight_decay": "0.1", "optimizer.beta1": "0.9",
    "microbatches": "4", "max_grad_norm": "1.0",
}  # fmt: skip
WORDS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "NAdam": "nadam", "Adan": "adan", "Muon": "muon"}


@pytest.fixture
def accepts(tmp_path: Path):
    """Whether a configuration is accepted."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    tiny = ("layers=8", "width=8", "heads=2", "context=8")
    given = [f"data={tmp_path / 'text.txt'}", *(f"model.{part}" for part in tiny)]

    def asked(*changes: str) -> bool:
        try:
            prepare(load_config(None, [*given, *changes]))
        except PenstockError:
            return False
        return True

    return asked


def test_every_asynchronous_method_has_a_row() -> None:
    late = {row.name for row in METHODS.values() if not RULES[row.rule].flushes}
    assert late - {"2bw-eager", "zb-h2-post", "zb-auto-post"} <= NEEDS.keys() <= late


@pytest.mark.parametrize("method", [method for method in NEEDS if method in OFFERED])
def test_a_method_takes_what_it_needs_and_refuses_else(accepts, method: str) -> None:
    needs = NEEDS[method]
    own = needs.partition(":")[2] if ":" in needs and needs.startswith(f"`{method}`:") else needs
    needs = "" if ":" in needs and own == needs else own  # of two in a row, one may need something
    keys = [setting for code in re.findall(r"`([^`]*=[^`]*)`", needs) for setting in code.split()]
    settings = {key: str(yaml.safe_load(value)) for key, _, value in (setting.partition("=") for setting in keys)}
    assert settings == {key: str(value) for key, value in METHODS[method].settings.items()}
    assert accepts(f"method={method}")
    for key in keys:
        name, advice = key.partition("=")[0], f"the paper's `{key}`" in needs
        assert accepts(f"method={method}", *keys, f"{name}={OTHERS[name]}") == advice, key
    named = {WORDS[word] for word in re.findall(r"\b[A-Z]\w+", needs) if word in WORDS}
    if named:
        assert {name for name in WORDS.values() if accepts(f"method={method}", f"optimizer.name={name}")} == named
    if "microbatches=1" not in keys:
        assert accepts(f"method={method}", *keys, "stages=4", "microbatches=3")
        few = f"microbatches={1 if '2 m >= ' in needs else 2}"
        assert accepts(f"method={method}", *keys, "stages=4", few) == ("m >= " not in needs)
    assert accepts(f"method={method}", *keys, "precision=bf16") == ("fp32" not in needs)


def test_the_reference_of_predictions_quotes_the_equations_of_the_page() -> None:
    block = PAGE.split("```text\nSGD ")[1].split("```")[0]
    quoted = {line.strip() for line in (predictions.__doc__ or "").splitlines()}
    assert {line.strip() for line in f"SGD {block}".splitlines()} <= quoted
