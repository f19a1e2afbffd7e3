"""Every method with everything else that a run may want: the numbers of the reference, or a refusal before it runs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.options.updates import Divergence
from penstock.partition.sequence_slices import Slicing
from penstock.runtime.update.divergence import Trouble
from penstock.schedule.methods.table import METHODS
from penstock.weights.corrections.pipemare import PipeMare
from support.cases import (
    make_batches,
    make_pipeline,
)
from support.combinations import (
    BUILDS,
    PAGE,
    SHARDS,
    Stated,
    answer,
    case_of,
    reason,
    stated_on,
)
from support.combined_features import CHECKS
from support.offered_methods import OFFERED

WORDS = {
    "clip": "which max_grad_norm needs",
    "loss scale": "which loss_scale needs",
    "width": "which data_parallel=2 needs",
    "bf16": "fp32",
    "tied": "untie",
    "recompute block": "recompute",
    "recompute stage": "recompute",
    **dict.fromkeys(SHARDS, "sharding|which data_parallel=2 needs"),
    "offload optimizer": "offload_optimizer",
    "combine": "combine",
    "delays": "delays",
    "slices": "slices",
    "fallback": "followed by 1f1b",
    "sync": "1f1b cannot be followed by",
}
"""What a refusal says of the feature."""
ADVICE = re.compile(r"\b(use|choose|remove|take|leave|set|untie|such as)\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def page() -> Stated:
    return stated_on(PAGE.read_text())


@pytest.mark.parametrize("features", CHECKS, ids=", ".join)
@pytest.mark.parametrize("method", OFFERED)
def test_it_runs_as_the_reference_says_or_is_refused(method: str, features: tuple[str, ...], page: Stated) -> None:
    """And the page says so."""
    for feature in features:
        assert page[method][feature] == reason(method, feature), "run python tests/support/combinations.py"
        refusal = answer(method, feature)
        if refusal is not None:
            assert "{" not in refusal
            assert_helps(method, feature, refusal)
    chosen = [feature for feature in features if answer(method, feature) is None]
    if chosen:
        CHECKS[features](case_of(method), chosen)


def assert_helps(method: str, feature: str, refusal: str) -> None:
    """A refusal names both sides, and what to do."""
    row = METHODS[method]
    sides = (method, repr(row.rule), repr(row.correction), f"order {row.order}")
    assert any(side in refusal for side in sides), refusal
    assert re.search(WORDS[feature], refusal)
    assert ADVICE.search(refusal), refusal


@pytest.mark.parametrize("features", list(CHECKS)[1:3], ids=", ".join)
def test_pipemare_without_t2(features: tuple[str, ...]) -> None:
    """All whose passes then read the newest weights."""
    chosen = [feature for feature in features if feature != "tied"]
    CHECKS[features](replace(case_of("pipemare"), correction=PipeMare(3, None)), chosen)


def test_the_page_has_every_method_and_every_feature(page: Stated) -> None:
    assert page.keys() == OFFERED.keys()
    checked = {feature for features in CHECKS for feature in features}
    assert all(stated.keys() == BUILDS.keys() == checked for stated in page.values())


def test_slicing_is_not_ignored_where_sequences_stay_whole() -> None:
    with pytest.raises(ConfigError, match="1f1b: slicing says how sequences are cut, .* take seq1f1b or terapipe"):
        make_pipeline(case_of("1f1b"), slicing=Slicing(dimension=0))


def test_a_divergence_is_found_without_being_looked_for() -> None:
    """Whoever gives a pipeline what counts as one is told of it."""
    case = replace(case_of("1f1b"), clip=0.6, loss="spiky", spikes=(2,))
    pipeline = make_pipeline(case, divergence=Divergence())
    list(pipeline.run(make_batches(case)))
    assert pipeline.trouble == Trouble(2, "the loss was inf")
    pipeline.look_out(3)
    assert pipeline.trouble is None
