"""Version rules: which weights each pass reads, and when an update creates a version.

Version v of a stage is its weights after v decided batches; STEP of batch t creates version t+1. A rule says from which
`Source` forwards, backwards and recomputes read, and where in the order the updates stand.
`penstock.schedule.transforms.apply_version_rule` writes both into an order; `penstock.schedule.proof.check` proves them
again, independently, by playing the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Source(StrEnum):
    """Where a pass gets its weights from."""

    BATCH = "batch"  # version t for batch t, or t-1 or t-2, as the delay of the rule says
    NEWEST = "newest"  # the newest version of the stage when the pass runs
    ADMISSION = "admission"  # the first stage's newest version when the microbatch was admitted
    FORWARD = "forward"  # the version that the forward of the same unit read
    COPY = "copy"  # a derived copy, made by a PREDICT on the same stage


class Placing(StrEnum):
    """The position of a STEP in the order."""

    END = "end"  # at the end of the batch's period, when nothing is in flight
    LATE = "late"  # directly before the first forward that reads the new version
    EARLY = "early"  # directly after the batch's last backward


class Update(StrEnum):
    """Where an update writes the new version."""

    IN_PLACE = "in place"  # overwrites the version it starts from
    COPY_ON_WRITE = "copy on write"  # in place, unless something still reads the version it starts from
    ROTATE = "rotate"  # into the buffer of its gradient; the version it starts from stays
    APART = "apart"  # into a third buffer; version and gradient stay until VALIDATE, as the update may be repeated


@dataclass(frozen=True)
class VersionRule:
    """One row of the table of rules.

    Attributes:
        forward, backward, recompute: where each kind of pass gets its weights from.
        step: the position of updates in the order.
        update: where an update writes.
        delay: updates between the version that all passes of a batch read and the one that is updated; so many versions
            before the newest a span hands to the next one. 0 where stages differ.
        buffers: limit of parameter-sized buffers (versions and gradients together) per stage; None for no limit.
        provisional: forwards may read a version before VALIDATE has accepted or rejected it.
        keeps_forward: backwards read a copy that is made from the version their forward read, among others.
        shares: copies are made for the first microbatch of a batch and read by all of the batch.
    """

    name: str
    summary: str
    forward: Source
    backward: Source
    step: Placing
    update: Update
    recompute: Source = Source.FORWARD
    delay: int = 0
    buffers: int | None = None
    provisional: bool = False
    keeps_forward: bool = False
    shares: bool = False

    @property
    def flushes(self) -> bool:
        """True if passes read all earlier updates, so that a batch begins when the one before is over."""
        return self.forward is Source.BATCH and not self.delay

    @property
    def pins(self) -> bool:
        """True if a microbatch in flight keeps the version alive that its forward read."""
        return (self.backward is Source.FORWARD and not self.copies_forward) or self.keeps_forward

    @property
    def copies_forward(self) -> bool:
        """True if forwards read derived copies."""
        return self.forward is Source.COPY

    @property
    def copies_backward(self) -> bool:
        """True if backwards read derived copies of their own."""
        return self.backward is Source.COPY

    @property
    def keeps_copy(self) -> bool:
        """True if backwards read the derived copy that their forward read."""
        return self.copies_forward and self.backward is Source.FORWARD

    @property
    def rebinds(self) -> bool:
        """True if backwards read other weights than their forwards."""
        return self.backward is not Source.FORWARD

    def most_in_flight(self, microbatches: int) -> float:
        """Return how many microbatches a rank of a chain can have in flight at most, in batches of this size.

        Behind a flush it is the batch. With a delay of k the update that makes the weights of a batch comes before its
        first forward, and waits for all backwards but those of the k batches between: these, and that forward.
        """
        if self.flushes:
            return microbatches
        return self.delay * microbatches + 1 if self.delay else math.inf

    def least_microbatches(self, in_flight: int) -> int:
        """Return the size of the smallest batches with which a rank can have so many in flight."""
        if self.flushes:
            return in_flight
        return max(-(-(in_flight - 1) // self.delay), 1) if self.delay else 1


_RULES = (
    VersionRule(
        "flush",
        "one version; the pipeline is empty at every update",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "double-buffer",
        "batch t reads version max(t-1, 0) everywhere (PipeDream-2BW, arXiv 2006.09503, sec. 3.1)",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.LATE,
        update=Update.ROTATE,
        delay=1,
        buffers=3,
    ),
    VersionRule(
        "triple-buffer",
        "batch t reads version max(t-2, 0) everywhere: double-buffer, an update later",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.LATE,
        update=Update.ROTATE,
        delay=2,
        buffers=4,
    ),
    VersionRule(
        "stash",
        "forwards read their stage's newest version, backwards that of their forward (PipeDream, 1806.03377)",
        forward=Source.NEWEST,
        backward=Source.FORWARD,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
    ),
    VersionRule(
        "vertical-sync",
        "every stage reads the version that the first stage had at admission (PipeDream, arXiv 1806.03377)",
        forward=Source.ADMISSION,
        backward=Source.FORWARD,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
    ),
    VersionRule(
        "newest",
        "every pass reads the newest version of its stage; no stash (PipeMare, arXiv 1910.05124)",
        forward=Source.NEWEST,
        backward=Source.NEWEST,
        recompute=Source.NEWEST,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "predicted",
        "forwards and backwards read copies that a PREDICT on their stage made of the newest version",
        forward=Source.COPY,
        backward=Source.COPY,
        recompute=Source.COPY,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "predicted-shared",
        "as predicted, but all microbatches of a batch read the copies that the first one made (XPipe, 1911.04610)",
        forward=Source.COPY,
        backward=Source.COPY,
        recompute=Source.COPY,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
        shares=True,
    ),
    VersionRule(
        "predicted-forward",
        "forwards read a copy that was predicted, backwards the newest version (PipeOptim, arXiv 2312.00839)",
        forward=Source.COPY,
        backward=Source.NEWEST,
        recompute=Source.COPY,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "predicted-stash",
        "forwards read a copy that was predicted, backwards the same one (second form in SpecTrain's code)",
        forward=Source.COPY,
        backward=Source.FORWARD,
        step=Placing.EARLY,
        update=Update.IN_PLACE,
        buffers=2,
    ),
    VersionRule(
        "blended",
        "backwards read a blend of their forward's version and the newest one (I-TiMePReSt, arXiv 2509.23241)",
        forward=Source.NEWEST,
        backward=Source.COPY,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
        keeps_forward=True,
    ),
    VersionRule(
        "admitted-newest",
        "forwards read what the first stage had at admission, backwards the newest version (TiMePReSt, 2410.14312)",
        forward=Source.ADMISSION,
        backward=Source.NEWEST,
        recompute=Source.NEWEST,
        step=Placing.EARLY,
        update=Update.COPY_ON_WRITE,
    ),
    VersionRule(
        "provisional",
        "as flush, but forwards may read a version before its VALIDATE (zero bubble's post-validation, 2401.10241)",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.APART,
        buffers=3,
        provisional=True,
    ),
    VersionRule(
        "provisional-in-place",
        "as provisional, but a rejected update is undone by arithmetic, without copies (2401.10241, app. on rollback)",
        forward=Source.BATCH,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.IN_PLACE,
        buffers=2,
        provisional=True,
    ),
    VersionRule(
        "frozen",
        "nothing is updated: evaluation",
        forward=Source.NEWEST,
        backward=Source.FORWARD,
        step=Placing.END,
        update=Update.IN_PLACE,
        buffers=1,
    ),
)

RULES: Mapping[str, VersionRule] = MappingProxyType({rule.name: rule for rule in _RULES})
"""Every version rule by its name."""
