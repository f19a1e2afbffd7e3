"""The bytes of weights, gradients and optimizer state on a rank, by kind, derived from what a proof has counted."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Update
from penstock.schedule.proof.proof import Proof

_WHOLE = 4  # bytes of a number in float32: weights that are updated, gradients, optimizer states


class StateBytes(NamedTuple):
    """Bytes for each parameter of a rank's whole share.

    Attributes:
        weights: of versions as passes read them; with level full, of gathered stages.
        gradients: at full size.
        sums: shards of summed gradients that wait for their update.
        master: weights that are updated, where passes read other ones.
        optimizer: optimizer states.
    """

    weights: Fraction
    gradients: Fraction
    sums: Fraction
    master: Fraction
    optimizer: Fraction


def state_bytes(proof: Proof, rank: int, width: int, low_precision: bool = False, states: int = 2) -> StateBytes:
    """Derive the bytes of a rank.

    Args:
        proof: of a schedule, sharded or not.
        rank: which.
        width: w, the parallel pipelines.
        low_precision: passes read weights of 2 bytes, and updates are made of others of 4.
        states: numbers that the optimizer keeps for a parameter: 2 for Adam.
    """
    schedule, level = proof.schedule, proof.schedule.sharding.level
    held = [(proof.stages[n], Fraction(1, schedule.chunks[n])) for n in schedule.on_rank(rank)]
    versions = sum((f.versions * share for f, share in held), Fraction(0))
    gradients = sum((f.gradients * share for f, share in held), Fraction(0))
    rest = sum((f.buffers * share for f, share in held), Fraction(0)) - versions
    part = Fraction(1, 1 if level is Level.NONE else width)
    size, sums = 2 if low_precision else _WHOLE, Fraction(0)
    rotates = RULES[schedule.rule].update is Update.ROTATE and not low_precision  # the new version lies in the gradient
    full = gradients if low_precision else rest
    if level.splits_gradients and not rotates:
        full, sums = proof.shards[rank].gradients_share, proof.shards[rank].waiting_share * part
    weights = proof.shards[rank].gathered_share if level is Level.FULL else versions
    master = part if low_precision or level is Level.FULL else Fraction(0)  # else updates are made of a version itself
    if level is Level.FULL and RULES[schedule.rule].update is Update.ROTATE:  # versions and sums, too, are shards
        full, sums, master = proof.shards[rank].gradients_share, rest * part, versions * part
        if low_precision:  # most sums wait directly before updates, when no older version is kept, in 2 bytes
            sums, master = proof.shards[rank].waiting_share * part, part
    return StateBytes(size * weights, _WHOLE * full, _WHOLE * sums, _WHOLE * master, _WHOLE * states * part)
