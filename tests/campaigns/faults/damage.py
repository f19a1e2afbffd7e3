"""What can happen to the files of a run that was interrupted, before it is resumed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.checkpoint.format import checkpoints

Damage = Callable[[Path, random.Random], None]
"""Changes files in a run folder."""


def flip(path: Path, dice: random.Random) -> None:
    """One bit is another one."""
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def cut(path: Path, dice: random.Random) -> None:
    """The end is missing."""
    data = path.read_bytes()
    path.write_bytes(data[: dice.randrange(len(data))])


def empty(path: Path, dice: random.Random) -> None:
    """Nothing is in it."""
    path.write_bytes(b"")


def remove(path: Path, dice: random.Random) -> None:
    """It is gone."""
    path.unlink()


def garbage(path: Path, dice: random.Random) -> None:
    """Other bytes, as many."""
    path.write_bytes(dice.randbytes(path.stat().st_size))


def grown(path: Path, dice: random.Random) -> None:
    """Something follows it."""
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randint(1, 100)))


def linked(path: Path, dice: random.Random) -> None:
    """A link to the same bytes stands in its place."""
    other = path.parent.parent / f"moved-{path.name}"
    os.rename(path, other)
    path.symlink_to(other)


def folder_instead(path: Path, dice: random.Random) -> None:
    """A folder stands in its place."""
    path.unlink()
    path.mkdir()


def of_newest(change: Damage, name: str) -> Damage:
    """A change to a file of the newest checkpoint; `stage` for that of any stage."""

    def damage(folder: Path, dice: random.Random) -> None:
        newest = checkpoints(folder)[-1]
        files = sorted(path for path in newest.iterdir() if path.name.startswith(name))
        change(dice.choice(files), dice)

    return damage


def of_all(change: Damage) -> Damage:
    """A change to a file of every checkpoint."""

    def damage(folder: Path, dice: random.Random) -> None:
        for place in checkpoints(folder):
            change(dice.choice(sorted(place.iterdir())), dice)

    return damage


def of_file(change: Damage, name: str) -> Damage:
    """A change to a file of the run."""
    return lambda folder, dice: change(folder / name, dice)


def junk_beside(folder: Path, dice: random.Random) -> None:
    """Files and folders that nobody has written lie among the checkpoints."""
    place = folder / "checkpoints"
    (place / "notes.txt").write_text("mine")
    (place / "old").mkdir()
    (place / "batch-x").mkdir()
    (place / ".batch-99999999.part").mkdir()


def newest_unfinished(folder: Path, dice: random.Random) -> None:
    """The newest checkpoint is half of one, as a dead writer leaves it."""
    newest = checkpoints(folder)[-1]
    (newest / "index.json").unlink()
    os.rename(newest, newest.with_name(f".{newest.name}.part"))


def all_removed(folder: Path, dice: random.Random) -> None:
    """No checkpoint is left."""
    shutil.rmtree(folder / "checkpoints")
