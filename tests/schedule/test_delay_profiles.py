"""The delays of pipelines without flushes, read off their schedules."""

from __future__ import annotations

import re

import pytest

from penstock.errors import ConfigError
from penstock.partition.emulated_delays import delays_of_profile


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
def test_endless_1f1b_is_as_late_as_the_stages_behind(stages: int) -> None:
    """PipeDream: stage i of P sees P - i updates between its forward and its backward, with vertical sync all P - 1."""
    assert delays_of_profile(f"1f1b:{stages}") == tuple(stages - i for i in range(1, stages + 1))
    assert delays_of_profile(f"vertical-sync:{stages}") == (stages - 1,) * stages
    assert delays_of_profile(f"2bw:{stages}") == (1,) * stages


@pytest.mark.parametrize(
    ("name", "hint"), [("1f1b", "'1f1b:8'"), ("1fb1:4", "'1f1b:4'"), ("2bw:0", "'2bw:8'"), ("3", "8"), ("1f1b:-2", "8")]
)
def test_other_names_are_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no profile '{re.escape(name)}'.*{hint}"):
        delays_of_profile(name)
