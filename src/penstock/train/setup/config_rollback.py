"""Restores the configuration of a run if the run fails before its first batch when it is resumed with changes."""

from __future__ import annotations

from pathlib import Path

from penstock.guarded_files import read_text, write_whole
from penstock.train.config.schema import TrainConfig
from penstock.train.config.written_config import (
    CONFIG,
    WRITTEN,
    changed_by_hand,
    changed_since,
    changes_in_words,
    option_of,
)
from penstock.train.setup.recorded_progress import recorded
from penstock.yaml_file import LARGEST


class ConfigBefore:
    """The configuration of a run as it was before the run is resumed.

    Args:
        folder: of the run.
        now: the configuration that it is resumed with.
    """

    def __init__(self, folder: Path, now: TrainConfig) -> None:
        self._folder, self._size = folder, recorded(folder).size
        self._changes = changed_since(folder, now)
        self._by_hand = changed_by_hand(folder) if self._changes else {}
        self._texts = {
            name: read_text(folder / name, LARGEST) for name in (CONFIG, WRITTEN) if (folder / name).exists()
        }

    def advice(self) -> str | None:
        """Take back what has changed if no batch was trained with it; return how to go on, None if nothing changed."""
        if not self._changes or recorded(self._folder, self._size).batches:
            return None
        for name, text in self._texts.items():
            write_whole(self._folder / name, text)
        back = [option_of(key, change["before"]) for key, change in self._by_hand.items()]
        if back:
            said = f"and to go on as before, change {CONFIG} back, or:"
        else:
            said = "which the run has not kept; to go on as before:"
        resumed = " ".join([f"  penstock train --resume {self._folder}", *(f"--set {option}" for option in back)])
        return f"no batch was trained with {changes_in_words(self._changes)}, {said}\n{resumed}"
