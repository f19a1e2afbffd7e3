"""What a pipeline wants of a schedule, and whether it can go on under another one.

That one must hold the same stages in the same places and take the same batches; what it adds to memory, or frees, is
seen to by `penstock.runtime.rank.rank.Worker.switch`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from penstock.comm.p2p.routing import needs_decisions
from penstock.errors import ConfigError
from penstock.partition.tied import Tie
from penstock.runtime.setup.capabilities import check_offered
from penstock.runtime.update.divergence import Divergence
from penstock.schedule.build import extend
from penstock.schedule.ir.rules import RULES
from penstock.schedule.ir.schedule import Schedule
from penstock.schedule.methods.combine import Combine
from penstock.schedule.proof.check import Proof
from penstock.schedule.transforms.batch_ops import check_together, what_decides
from penstock.schedule.transforms.recompute import Segments
from penstock.schedule.transforms.unfuse import taken_apart
from penstock.stage.autograd.recompute import Recompute, check_segments
from penstock.weights.decision import Policy


def schedule_of(given: Schedule | Proof) -> Schedule:
    """The schedule, as given or as proven.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(given, Schedule | Proof):
        raise ConfigError(f"schedule must come from make_schedule, prove or check, not {given!r:.80}")
    return given if isinstance(given, Schedule) else given.schedule


class Wants(NamedTuple):
    """What a pipeline wants of every schedule.

    Attributes:
        deciding: for what all stages decide together before an update (`what_decides`).
        reduces: parallel pipelines add their gradients.
        recomputes: forwards are run again, in actions of their own.
        tied: stages that share parameters.
        combine: how parallel pipelines agree.
        segments: how many stages run forwards again together.
    """

    deciding: Mapping[str, str]
    reduces: bool
    recomputes: bool
    tied: Collection[int]
    combine: Combine
    segments: Segments = 1

    @classmethod
    def of(
        cls,
        policy: Policy,
        width: int,
        combine: Combine,
        recompute: Recompute,
        segments: Segments,
        ties: Collection[Tie],
        *,
        fp16: bool,
    ) -> Wants:
        """What follows from a user's choices (see `penstock.runtime.pipeline.Pipeline`).

        Args:
            policy, width, combine, recompute, segments: as chosen.
            ties: what stages share.
            fp16: losses are scaled because of fp16 alone.
        """
        apart = combine.kind if combine.apart else None
        deciding = what_decides(policy.clip is not None, policy.loss_scale is not None, fp16, width, apart)
        tied, again = {index for tie in ties for index in tie.stages}, check_segments(recompute, segments)
        return cls(deciding, width != 1 and not combine.apart, recompute == "stage", tied, combine, again)


def extended(wants: Wants, given: Schedule | Proof) -> Proof:
    """The proof of a schedule with all that a pipeline wants of it.

    Raises:
        CapabilityError: the runtime does not offer it.
        ConfigError: its updates cannot wait for what all stages decide together.
    """
    whole = schedule_of(given)
    plain = taken_apart(whole)  # executors run one pass at a time
    check_together(plain, wants.deciding, wants.tied)
    proof = extend(
        given if plain is whole else plain,
        decides=bool(wants.deciding) or needs_decisions(plain) or RULES[plain.rule].provisional,
        reduces=wants.reduces,
        recomputes=wants.recomputes,
        segments=wants.segments,
        tied=wants.tied,
        averages=wants.combine.every if wants.combine.apart else None,
        behind=wants.combine.behind,
    )
    check_offered(proof.schedule, wants.combine)
    return proof


def check_heard(divergence: Divergence | None, decides: bool, combine: Combine) -> None:
    """Make sure that all ranks would hear of a divergence.

    Raises:
        ConfigError: stages do not decide together, or its numbers cannot be.
    """
    if divergence is None:
        return
    divergence.check()
    if combine.apart:
        raise ConfigError(
            f"with combine={combine.kind} parallel pipelines see losses of their own, so they would not agree on a "
            "divergence; leave one of them out"
        )
    if not decides:
        raise ConfigError("divergence is seen where all stages decide together; set clip, loss_scale or width")


def check_same_places(present: Schedule, other: Schedule) -> None:
    """Make sure that stages need not move, and that a batch is divided in the same way.

    Raises:
        ConfigError: a schedule has other stages, other ranks for them, other edges between them or other microbatches.
    """
    differences = {
        "microbatches per batch": (present.microbatches, other.microbatches),
        "stages": (present.num_stages, other.num_stages),
        "ranks": (present.ranks, other.ranks),
        "directions": (present.directions, other.directions),
        "the place of stages": (sorted(present.stages), sorted(other.stages)),
        "what stages hand on to which": (sorted(present.edges), sorted(other.edges)),
        "frozen stages": (sorted(present.frozen), sorted(other.frozen)),
        "slices of a sequence": (present.slices, other.slices),
    }
    for what, (here, there) in differences.items():
        if here != there:
            numbers = f" ({here} and {there})" if isinstance(here, int) else ""
            raise ConfigError(
                f"{present.name} cannot be followed by {other.name}: they differ in {what}{numbers}; a run changes "
                "between methods that hold the same stages on the same ranks and take the same batches, such as 2bw, "
                "stash, 1f1b and gpipe"
            )
