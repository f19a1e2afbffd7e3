"""Settings of optimizers that users set by hand between two runs, compared between processes.

In one process the copies of a stage follow the first one. Processes only compare theirs: copies of a stage must be
stepped alike. Stages may differ, as some may be meant to, but a rate that a rank has been left without is worth a
warning: a scheduler that is stepped on one rank only looks the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.runtime.setup.rank_state import RankState
from penstock.stage.trained_stage_weights import TrainedWeights

_LOG = logging.getLogger(__name__)
Settings = list[tuple[int, list[dict[str, str]]]]
"""By index of a stage that has an optimizer: per parameter group, what was set by hand, as text."""


def settings_by_hand(ranks: Sequence[RankState]) -> Settings:
    """Return what was set by hand on the ranks of this process."""
    trained = [(n.index, s.weights) for rank in ranks for n, s in rank.stages.items()]
    return [
        (index, [{key: repr(value) for key, value in group.items()} for group in weights.updater.rates.groups_by_hand])
        for index, weights in trained
        if isinstance(weights, TrainedWeights) and weights.updater.optimizer is not None
    ]


def check_settings(everywhere: Sequence[Settings]) -> None:
    """Compare what was set by hand, by process; say in the log where only some ranks have a rate that was.

    Raises:
        ConfigError: copies of a stage have different settings, so they would no longer hold the same weights.
    """
    first: dict[int, tuple[int, list[dict[str, str]]]] = {}
    rates: dict[bool, list[int]] = {True: [], False: []}
    for rank, part in enumerate(everywhere):
        for index, groups in part:
            other, known = first.setdefault(index, (rank, groups))
            if groups != known:
                raise ConfigError(
                    f"stage {index} is stepped with other settings on ranks {other} and {rank}, which hold the same "
                    f"weights: {_shown(known)} and {_shown(groups)} were set by hand; set the same on all ranks (also "
                    "where a scheduler that needs a metric is stepped: send its value to all of them)"
                )
            rates[any("lr" in group for group in groups)].append(rank)
    if rates[True] and rates[False]:
        _LOG.warning(
            "learning rates were set by hand on ranks %s, not on ranks %s; if that is not meant, set them on all ranks",
            *(", ".join(map(str, sorted(set(rates[which])))) for which in (True, False)),
        )


def _shown(groups: Sequence[dict[str, str]]) -> str:
    found = [", ".join(f"{key}={value}" for key, value in group.items()) or "nothing" for group in groups]
    return " and ".join(dict.fromkeys(found)) or "nothing"
