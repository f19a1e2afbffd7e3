"""The settings of an optimizer's parameter groups, and what users have set by hand between two runs.

Rates, momentum and the like come from the factory, and from schedules and corrections at every update. What else has
changed when a run begins was set by hand: in `param_groups`, or by a scheduler of torch that the user steps between
runs. It is kept apart, so that copies of the stage can follow and checkpoints can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapabilityError, CheckpointError, ConfigError

_NO_SETTINGS = ("params", "param_names")
_PLAIN = bool | int | float | str | None


class GroupSettings:
    """The settings of all parameter groups of an optimizer, as its factory has made it.

    Args:
        optimizer: the optimizer; None for none, which has no groups.

    Attributes:
        rates: per group, the learning rate of the factory, or the one set by hand since, which schedules and
            corrections multiply.
        by_hand: per group, what was set by hand between two runs and differs from what the factory has set.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._sizes = [len(group["params"]) for group in self.groups]
        self._made = [_settings(group) for group in self.groups]
        self.rates: list[Any] = [made["lr"] for made in self._made]
        self.by_hand: list[dict[str, Any]] = [{} for _ in self._made]
        self._corrected: list[dict[str, Any]] = [{} for _ in self._made]  # what a correction has changed, before that
        self._expected = [dict(made) for made in self._made]  # what only the optimizer itself would change
        self._left = [dict(made) for made in self._made]  # as the last update has left them

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups themselves."""
        return [] if self._optimizer is None else self._optimizer.param_groups

    def check_members(self) -> None:
        """Make sure that nobody has added parameters, or whole groups.

        Raises:
            ConfigError: somebody has.
        """
        sizes = [len(group["params"]) for group in self.groups]
        if sizes != self._sizes:
            raise ConfigError(
                f"{type(self._optimizer).__name__} has parameter groups of {sizes} parameters now, and had "
                f"{self._sizes} when it was made for its stage (add_param_group?), but what is trained is settled "
                "then; have the optimizer factory give all parameters of a stage to an optimizer of its own, or make a "
                "new Pipeline to train others (a checkpoint from before can be loaded into it)"
            )

    def note(self) -> None:
        """Note the settings after an update: whatever changes before the next run is set by hand."""
        self._left = [_settings(group) for group in self.groups]

    def moved_rate(self) -> tuple[Any, Any] | None:
        """Return a rate as the last update has left it, and as it is now, if they differ.

        Raises:
            ConfigError: somebody has added a group.
        """
        groups = self.groups
        if len(groups) != len(self._left):
            self.check_members()
        for left, group in zip(self._left, groups, strict=True):
            if group["lr"] is not left["lr"] and group["lr"] != left["lr"]:
                return left["lr"], group["lr"]
        return None

    def moved(self) -> list[dict[str, Any]]:
        """Return what has changed since the last update, per group."""
        return [
            {key: value for key, value in _settings(group).items() if key not in left or not _same(value, left[key])}
            for group, left in zip(self.groups, self._left, strict=True)
        ]

    def take_over(self) -> None:
        """Take what has changed since the last update as set by hand."""
        for place, moved in enumerate(self.moved()):
            made, by_hand = self._made[place], self.by_hand[place]
            for key, value in moved.items():
                self._put(place, key, value)
                by_hand[key] = value
                if key in made and _same(value, made[key]):
                    del by_hand[key]

    def put(self, by_hand: Sequence[Mapping[str, Any]]) -> None:
        """Have these settings set by hand, per group, and no others."""
        self.take_over()
        for place, wanted in enumerate(by_hand):
            made, now = self._made[place], self.by_hand[place]
            for key in now.keys() - wanted.keys():
                if key in made:
                    self._put(place, key, made[key])
                else:
                    for known in (self.groups[place], self._left[place], self._expected[place]):
                        known.pop(key, None)
            for key, value in wanted.items():
                if key not in now or not _same(value, now[key]):
                    self._put(place, key, value)
            self.by_hand[place] = dict(wanted)

    def _put(self, place: int, key: str, value: Any) -> None:
        self.groups[place][key] = value.clone() if isinstance(value, Tensor) else value
        self._left[place][key] = self._expected[place][key] = value
        self._corrected[place].pop(key, None)
        if key == "lr":
            self.rates[place] = value

    def correct(self, begin: Callable[[torch.optim.Optimizer], None] | None) -> None:
        """Let a correction change settings, after undoing the changes of the one before."""
        for group, changed, rate in zip(self.groups, self._corrected, self.rates, strict=True):
            group.update(changed, lr=rate)
        before = [_settings(group) for group in self.groups]
        if begin is not None and self._optimizer is not None:
            begin(self._optimizer)
        self._expected = [_settings(group) for group in self.groups]
        self._corrected = [
            {key: value for key, value in known.items() if not _same(value, now[key])}
            for known, now in zip(before, self._expected, strict=True)
        ]
        self.note()

    def changed(self, place: int, without: Collection[str]) -> list[str]:
        """Return which settings of a group the optimizer itself has changed, besides those that a scheduler sets."""
        known = self._expected[place]
        return sorted(
            key
            for key, value in self._left[place].items()
            if key != "lr" and key not in without and not (key in known and _same(value, known[key]))
        )

    def state(self, names: Mapping[int, str]) -> dict[tuple[str, str], Any]:
        """Return what was set by hand, by setting and parameter, as plain values.

        Args:
            names: of the parameters, by id.

        Raises:
            CapabilityError: a checkpoint cannot hold it.
        """
        found: dict[tuple[str, str], Any] = {}
        for group, by_hand in zip(self.groups, self.by_hand, strict=True):
            for key, value in by_hand.items():
                plain = _plain(value)
                if plain is _NO_VALUE:
                    raise CapabilityError(
                        f"{key} of a parameter group was set by hand to a {type(value).__name__}, which a checkpoint "
                        "cannot hold; it can hold numbers, texts and tuples of them"
                    )
                found |= {(key, names[id(parameter)]): plain for parameter in group["params"]}
        return found

    def load(
        self, state: Mapping[str, Mapping[str, Any]], names: Mapping[int, str], without: Sequence[Collection[str]]
    ) -> None:
        """Restore what `state` returned, also with other groups.

        Args:
            state: by parameter and setting; parameters that are not in it take the settings of their groups.
            names: of the parameters, by id.
            without: per group, what a scheduler sets.

        Raises:
            CheckpointError: a group has parameters with different settings.
        """
        wanted: list[dict[str, Any]] = []
        for place, group in enumerate(self.groups):
            members = [name for name in (names[id(parameter)] for parameter in group["params"]) if name in state]
            each = [state[name] for name in members]
            other = next((n for n, found in zip(members, each, strict=True) if dict(found) != dict(each[0])), None)
            if other is not None:
                raise CheckpointError(
                    f"{members[0]} and {other} are in one parameter group, but {dict(each[0])} and "
                    f"{dict(state[other])} were set by hand for them when the checkpoint was written; use the "
                    "parameter groups that it was written with"
                )
            found = each[0] if each else {}
            like = self._made[place]
            wanted.append({k: _as(value, like.get(k)) for k, value in found.items() if k not in without[place]})
        self.put(wanted)


_NO_VALUE = object()


def _plain(value: Any) -> Any:
    """A setting as a plain value, or `_NO_VALUE` if it is none."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return _NO_VALUE if _NO_VALUE in parts else parts
    return value if isinstance(value, _PLAIN) else _NO_VALUE


def _as(plain: Any, like: Any) -> Any:
    """A plain value as the setting that it was."""
    if isinstance(like, Tensor):
        return torch.as_tensor(plain, dtype=like.dtype, device=like.device)
    return tuple(plain) if isinstance(plain, list) else plain


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the settings of a parameter group."""
    found = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)
