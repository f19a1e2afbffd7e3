"""On which devices the ranks of a planned run belong, where these differ: checked, and said."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from penstock.cli.output import print_words
from penstock.errors import ConfigError
from penstock.job.place import job_place

if TYPE_CHECKING:
    from penstock.train.config.schema import TrainConfig


def say_places(settings: TrainConfig) -> None:
    """Print on which devices the ranks of this run belong, on one rank.

    Raises:
        ConfigError: the plan is one for another number of ranks.
    """
    from penstock.plan.stages.device_hierarchy import places_in_words

    if settings.placement is None:
        return
    if len(settings.placement) != settings.processes:
        raise ConfigError(
            f"placement names the devices of {len(settings.placement)} ranks, but this run has {settings.processes}; "
            "plan again, or set placement to null"
        )
    place = job_place(os.environ)
    if place is None or place.rank == 0:
        print_words(Console(stderr=True), Text(f"{places_in_words(settings.placement, settings.stages)}."))
