"""Delays by choice: what an asynchronous pipeline would read, on a synchronous schedule of any depth.

Batch t reads of a block with delay tau the weights W(max(t - tau, 0)), in forward and backward; the update is made
synchronously: W(t+1) comes from the newest weights W(t) and the gradient at the older ones. So staleness can be studied
without the pipeline that causes it, on one machine, and the numbers depend on neither depth nor order.

Backwards may have delays of their own, tau_b: wherever their formulas contain weights, these are W(max(t - tau_b, 0));
activations stay as the forward made them, on W(max(t - tau, 0)). That is what happens in pipelines without a stash
(PipeMare, arXiv 1910.05124, u_fwd and u_bkwd). It is the gradient of nothing, but where tau_b = tau.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.schedule.delay_profiles import delays_of_profile
from penstock.schedule.ir.schedule import Op, Schedule, passes

Delays = int | str | Sequence[int] | Mapping[str, int] | Callable[[str], int]
"""Of all blocks; of a profile such as "1f1b:8"; in a row; by name, the others without; or by a function of the name."""


@dataclass(frozen=True)
class BlockDelays:
    """The delay of every block.

    Attributes:
        by_block: in updates.
        chosen: each was given for its block, so none may be without effect.
        what: for messages, "delays" or "backward_delays".
    """

    by_block: Mapping[str, int]
    chosen: bool
    what: str = "delays"

    def by_parameter(self, names: Collection[str]) -> dict[str, int]:
        """The delays of parameters, by their canonical names."""
        return {name: self.by_block[block_of(name, self.by_block)] for name in names}

    def check_trained(self, blocks: Mapping[str, Any]) -> None:
        """Make sure that what was chosen to be delayed changes at all.

        Args:
            blocks: some of them, made.

        Raises:
            ConfigError: a block has no trained parameters.
        """
        for name, block in blocks.items() if self.chosen else ():
            trained = isinstance(block, nn.Module) and any(p.requires_grad for p in block.parameters())
            if self.by_block[name] and not trained:
                raise ConfigError(
                    f"{self.what}: block {name!r} has no trained parameters, so it cannot be {self.by_block[name]} "
                    "updates behind; leave it out, or give it 0"
                )


def resolve_delays(
    given: Delays | None, blocks: Mapping[str, Any], tied: Mapping[str, str], rule: str, what: str = "delays"
) -> BlockDelays:
    """What a user's delays say about every block.

    Args:
        given: in one of its forms.
        blocks: the model.
        tied: name of a parameter -> that of the one it is the same as.
        rule: the schedule's version rule.
        what: for messages.

    Raises:
        ConfigError: unknown blocks, a number that is no delay, another rule than flush, or one parameter with several
            delays.
    """
    delays = _by_block(given, list(blocks), what)
    for name, delay in delays.items():
        if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
            raise ConfigError(
                f"{what}: block {name!r} is given {delay!r}; a delay is a whole number of updates, 0 or more"
            )
    if any(delays.values()) and rule != "flush":
        raise ConfigError(
            f"{what} need version rule 'flush', under which batch t would read W(t) everywhere; rule {rule!r} chooses "
            f"versions itself. Take a method that flushes, such as 1f1b, or leave {what} out"
        )
    for first, other in _sharing(blocks, tied):
        if delays[first] != delays[other]:
            raise ConfigError(
                f"{what}: blocks {first!r} ({delays[first]} updates) and {other!r} ({delays[other]}) share a "
                "parameter, which has one delay; give both the same, or untie them"
            )
    return BlockDelays(delays, isinstance(given, Mapping | Sequence) and not isinstance(given, str), what)


def resolve_backward_delays(
    given: Delays | None, forward: BlockDelays, blocks: Mapping[str, Any], tied: Mapping[str, str], rule: str
) -> BlockDelays | None:
    """The delays of backwards, as `resolve_delays` finds them; None where they are those of forwards.

    Raises:
        ConfigError: as `resolve_delays`.
    """
    if given is None:
        return None
    found = resolve_delays(given, blocks, tied, rule, "backward_delays")
    return None if found.by_block == forward.by_block else found


def resolve_both(
    delays: Delays | None,
    backward_delays: Delays | None,
    blocks: Mapping[str, Any],
    tied: Mapping[str, str],
    schedule: Schedule,
    recompute: str,
) -> tuple[BlockDelays, BlockDelays | None]:
    """The delays of forwards, and those of backwards where they are others.

    Raises:
        ConfigError: as `resolve_delays`, `check_backward_delays`.
    """
    forward = resolve_delays(delays, blocks, tied, schedule.rule)
    backward = resolve_backward_delays(backward_delays, forward, blocks, tied, schedule.rule)
    check_backward_delays(schedule, backward, recompute)
    return forward, backward


def check_backward_delays(schedule: Schedule, backward: BlockDelays | None, recompute: str) -> None:
    """Make sure that backwards can look up other weights than their forwards read.

    Raises:
        ConfigError: they come in two halves, what they need is moved away, or forwards are run again for them.
    """
    if backward is None:
        return
    operations = {p.op for program in schedule.programs for a in program.period for p in passes(a)}
    if recompute != "none" or Op.R in operations:
        raise ConfigError(
            "backward_delays: with recompute a forward is run again for its backward, and nothing says on which "
            "weights; leave recompute or backward_delays out"
        )
    fault = "runs backwards in two halves" if Op.W in operations else None
    fault = "moves activations away" if Op.OFFLOAD in operations else fault
    if fault is not None:
        raise ConfigError(
            f"backward_delays: {schedule.name} {fault}, which is offered where backwards read the weights of their "
            "forward; take another method that flushes, such as 1f1b, or leave backward_delays out"
        )


def block_of(parameter: str, blocks: Collection[str]) -> str:
    """The block that a parameter belongs to, by its canonical name.

    Raises:
        ConfigError: none of them.
    """
    for block in blocks:
        if parameter.startswith(f"{block}."):
            return block
    raise ConfigError(f"{parameter!r} is a parameter of no block; blocks: {', '.join(blocks)}")


def _by_block(given: Delays | None, names: list[str], what: str) -> dict[str, int]:
    if given is None or isinstance(given, int):
        return dict.fromkeys(names, given or 0)
    if isinstance(given, str):
        stages = delays_of_profile(given)
        if len(stages) > len(names):
            raise ConfigError(
                f"{what}: profile {given!r} has {len(stages)} stages, but the model only {len(names)} blocks; name a "
                "smaller number of stages"
            )
        return {name: stages[i * len(stages) // len(names)] for i, name in enumerate(names)}
    if isinstance(given, Mapping):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            near = difflib.get_close_matches(str(unknown), names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; blocks: {', '.join(names)}"
            raise ConfigError(f"{what}: the model has no block {unknown!r}{hint}")
        return {name: given.get(name, 0) for name in names}
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(names):
            raise ConfigError(f"{what}: {len(given)} numbers were given, but the model has {len(names)} blocks")
        return dict(zip(names, given, strict=True))
    if not callable(given):
        raise ConfigError(
            f"{what} must be a number, a profile such as '1f1b:8', a list, a dict or a function, got {given!r:.80}"
        )
    return {name: given(name) for name in names}


def _sharing(blocks: Mapping[str, Any], tied: Mapping[str, str]) -> list[tuple[str, str]]:
    """Pairs of blocks that share a trained parameter."""
    pairs = [(block_of(b, blocks), block_of(a, blocks)) for a, b in tied.items()]
    first: dict[int, str] = {}
    for name, block in blocks.items():
        for parameter in block.parameters() if isinstance(block, nn.Module) else ():
            if parameter.requires_grad:
                pairs.append((first.setdefault(id(parameter), name), name))
    return pairs
