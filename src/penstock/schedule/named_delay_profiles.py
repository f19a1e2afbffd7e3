"""Delay profiles: the delay of every stage under a schedule without flushes, by a short name such as "1f1b:8"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.checks import nearest
from penstock.errors import ConfigError
from penstock.schedule.build import prove

_KINDS: Mapping[str, tuple[str, Callable[[int], int]]] = MappingProxyType(
    {
        "1f1b": ("stash", lambda _: 1),  # method, and microbatches per update
        "vertical-sync": ("vertical-sync", lambda _: 1),
        "2bw": ("2bw", lambda stages: stages),
    }
)


def delays_of_profile(name: str) -> tuple[int, ...]:
    """Return the delay of every stage, the first one's first, in updates between the version read and the one updated.

    The delays are those of the schedule in its steady state.

    Args:
        name: "KIND:STAGES", where the kind is "1f1b" (endless 1F1B with an update for each microbatch, whose backwards
            read what their forwards read: stage i of P, from 1 on, is P - i behind), "vertical-sync" (the same with the
            first stage's version everywhere) or "2bw" (double-buffered weights).

    Raises:
        ConfigError: there is no such profile.
    """
    kind, _, number = name.partition(":")
    if kind not in _KINDS or not number.isascii() or not number.isdigit() or int(number) < 1:
        example = f"{nearest(kind, _KINDS) or '1f1b'}:{number if number.isdigit() and int(number) else 8}"
        raise ConfigError(
            f"delays: there is no profile {name!r}; give one of {', '.join(_KINDS)} and a number of stages, as in "
            f"{example!r}"
        )
    method, microbatches = _KINDS[kind]
    stages = int(number)
    proof = prove(method, stages, microbatches(stages))
    found = {stage.index: facts.delay.forward for stage, facts in proof.stages.items()}
    delays = tuple(int(found[index]) for index in sorted(found))
    assert all(delays[index] == found[index] for index in found), (
        "one update per microbatch, or one version for a batch"
    )
    return delays
