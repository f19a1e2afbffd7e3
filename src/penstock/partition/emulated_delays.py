"""Chosen delays per block: read stale weights, as in an asynchronous pipeline, on a synchronous schedule of any depth.

Batch t reads the weights W(max(t - tau, 0)) of a block with delay tau, in forward and backward; the update is made
synchronously: W(t+1) is computed from the newest weights W(t) and the gradient at the older ones. So staleness can be
studied without the pipeline that causes it, on one machine, and the results depend on neither depth nor order.

Backwards may have delays of their own, tau_b: wherever their formulas contain weights, these are W(max(t - tau_b, 0));
activations are those of the forward on W(max(t - tau, 0)). This is what happens in pipelines without a stash
(PipeMare, arXiv 1910.05124, u_fwd and u_bkwd). Unless tau_b = tau, the result is not the gradient of any function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from penstock.checks import check_whole, did_you_mean, nearest
from penstock.errors import ConfigError
from penstock.partition.parameter_names import block_of
from penstock.partition.replay.model_stages import blocks_within
from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op, Schedule

Delays = int | str | Sequence[int] | Mapping[str, int] | Callable[[str], int]
"""One delay for all blocks, a profile such as "1f1b:8", a list, delays by name (others are 0), or a function of the
name."""
_KINDS: Mapping[str, tuple[str, Callable[[int], int]]] = MappingProxyType(
    {
        "1f1b": ("stash", lambda _: 1),  # method, and microbatches per update
        "vertical-sync": ("vertical-sync", lambda _: 1),
        "2bw": ("2bw", lambda stages: stages),
    }
)


@dataclass(frozen=True)
class BlockDelays:
    """The delay of every block.

    Attributes:
        by_block: delay of each block, in updates.
        chosen: True if delays were given block by block, so that each must have an effect.
        what: name of the option for error messages, "delays" or "backward_delays".
    """

    by_block: Mapping[str, int]
    chosen: bool
    what: str = "delays"

    def by_parameter(self, names: Collection[str], blocks: Mapping[str, Any]) -> dict[str, int]:
        """Return the delays of parameters of some blocks, by their canonical names."""
        within = blocks_within(blocks)
        return {name: self.by_block[_owner(name, within)] for name in names}

    def check_trained(self, blocks: Mapping[str, Any]) -> None:
        """Raise an error if a block with a chosen delay has no trained parameters.

        Args:
            blocks: some of the blocks, built.

        Raises:
            ConfigError: a block has no trained parameters.
        """
        for name, block in blocks_within(blocks).items() if self.chosen else ():
            trained = isinstance(block, nn.Module) and any(p.requires_grad for p in block.parameters())
            if self.by_block[name] and not trained:
                raise ConfigError(
                    f"{self.what}: block {name!r} has no trained parameters, so a delay of {self.by_block[name]} "
                    "updates has no effect; remove it, or set it to 0"
                )


def resolve_delays(
    given: Delays | None, blocks: Mapping[str, Any], tied: Mapping[str, str], rule: str, what: str = "delays"
) -> BlockDelays:
    """Return the delay of every block for the delays that a user gave.

    Args:
        given: the delays in any accepted form; None for no delays.
        blocks: the model.
        tied: name of a parameter -> name of the parameter it is tied to.
        rule: the schedule's version rule.
        what: name of the option for error messages.

    Raises:
        ConfigError: a block is unknown, a delay is not a whole number of at least 0, the rule is not flush, or one
            parameter has several delays.
    """
    delays = _by_block(given, list(blocks_within(blocks)), what)
    for name, delay in delays.items():
        check_whole(f"{what}: the delay of block {name!r}, in updates,", delay, 0)
    if any(delays.values()) and rule != "flush":
        raise ConfigError(
            f"{what} need version rule 'flush', under which batch t reads W(t) everywhere; rule {rule!r} chooses "
            f"versions itself. Use a method that flushes, such as 1f1b, or remove {what}"
        )
    for first, other in _sharing(blocks, tied):
        if delays[first] != delays[other]:
            raise ConfigError(
                f"{what}: blocks {first!r} ({delays[first]} updates) and {other!r} ({delays[other]}) share a "
                "parameter, which can have only one delay; give both the same delay, or untie them"
            )
    return BlockDelays(delays, isinstance(given, Mapping | Sequence) and not isinstance(given, str), what)


def resolve_backward_delays(
    given: Delays | None, forward: BlockDelays, blocks: Mapping[str, Any], tied: Mapping[str, str], rule: str
) -> BlockDelays | None:
    """Return the delays of backwards, as `resolve_delays` does; None if they equal those of forwards.

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
    recomputes: bool,
) -> tuple[BlockDelays, BlockDelays | None]:
    """Return the delays of forwards, and those of backwards if they differ.

    Raises:
        ConfigError: as `resolve_delays`, `check_backward_delays`.
    """
    forward = resolve_delays(delays, blocks, tied, schedule.rule)
    backward = resolve_backward_delays(backward_delays, forward, blocks, tied, schedule.rule)
    check_backward_delays(schedule, backward, recomputes)
    return forward, backward


def check_backward_delays(schedule: Schedule, backward: BlockDelays | None, recomputes: bool) -> None:
    """Raise an error if backwards cannot read other weights than their forwards.

    Raises:
        ConfigError: backwards are split into I and W, activations are offloaded, or forwards are recomputed.
    """
    if backward is None:
        return
    operations = schedule.operations
    if recomputes or Op.R in operations:
        raise ConfigError(
            "backward_delays cannot be combined with recompute: it is undefined which weights the recomputed forward "
            "should use. Remove one of them"
        )
    fault = "splits backwards into two halves" if Op.W in operations else None
    fault = "offloads activations" if Op.OFFLOAD in operations else fault
    if fault is not None:
        raise ConfigError(
            f"backward_delays: {schedule.name} {fault}, which requires backwards to read the weights of their forward; "
            "use another method that flushes, such as 1f1b, or remove backward_delays"
        )


def _owner(parameter: str, blocks: Mapping[str, Any]) -> str:
    """Return the block that a parameter belongs to, by its canonical name.

    Raises:
        ConfigError: it belongs to no block.
    """
    block = block_of(parameter, blocks)
    if block is None:
        raise ConfigError(f"{parameter!r} is not a parameter of any block; blocks: {', '.join(blocks)}")
    return block


def _by_block(given: Delays | None, names: list[str], what: str) -> dict[str, int]:
    if given is None or isinstance(given, int):
        return dict.fromkeys(names, given or 0)
    if isinstance(given, str):
        stages = delays_of_profile(given)
        if len(stages) > len(names):
            raise ConfigError(
                f"{what}: profile {given!r} has {len(stages)} stages, but the model has only {len(names)} blocks; use "
                "a smaller number of stages"
            )
        return {name: stages[i * len(stages) // len(names)] for i, name in enumerate(names)}
    if isinstance(given, Mapping):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            hint = did_you_mean(unknown, names) or f" Blocks: {', '.join(names)}"
            raise ConfigError(f"{what}: the model has no block {unknown!r}.{hint}")
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
    """Return the pairs of blocks that share a trained parameter."""
    pairs = [(_owner(b, blocks), _owner(a, blocks)) for a, b in tied.items()]
    first: dict[int, str] = {}
    for name, block in blocks.items():
        for parameter in block.parameters() if isinstance(block, nn.Module) else ():
            if parameter.requires_grad:
                pairs.append((first.setdefault(id(parameter), name), name))
    return pairs


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
