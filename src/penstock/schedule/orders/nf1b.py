"""nF1B: the n forwards of a batch one by one, then one backward for all of them (TiMePReSt).

Dutta, Chaki and De, arXiv 2410.14312 (FGCS 178, 108260), sec. 3.2: stages run n forwards and one backward in turn, and
a backward goes first as soon as it can. In their figures each forward of a microbatch and each backward of a batch
takes one slot. So rank r among p runs 2 (p - 1 - r) forwards beyond the n of a batch until the gradient of that batch
reaches it, as in eager 1F1B, and its backward stands directly behind them, also within a later batch. The
closed form is ours, as the papers were not available; it gives the figure for p = 3, n = 2 as others describe it:

    r0: F0 F1 F2 F3 F4 F5 B0..1 F6 F7 B2..3
    r1: F0 F1 F2 F3 B0..1 F4 F5 B2..3
    r2: F0 F1 B0..1 F2 F3 B2..3

The period of batch t holds its n forwards, and the one backward that falls among them:
    r0: F0 F1 B-4..-3    r1: F0 F1 B-2..-1    r2: F0 F1 B0..1

A backward of n microbatches takes about 2 n slots, not one, so rank 0 then waits for it. `ahead` replaces the 2: the
number of forwards that a rank runs ahead of the next one. With ahead = n the order is 1F1B of whole batches, and ranks
wait only in fill and drain, at the price of more activations and longer delays.
"""

from penstock.errors import ScheduleError
from penstock.schedule.ir.order import Order, make_order, pass_of
from penstock.schedule.ir.schedule import Action, Op, Unit, straight


def nf1b(stages: int, microbatches: int, *, ahead: int = 2) -> Order:
    """Run n forwards and one backward in turn, where n is the number of microbatches of a batch.

    Raises:
        ScheduleError: `ahead` is so small that backwards would precede the arrival of their gradients.
    """
    if ahead < 2:
        raise ScheduleError(
            f"nf1b: ahead={ahead}, but a gradient returns 2 slots later per stage; set ahead to at least 2"
        )
    periods, epilogues = [], []
    for stage in straight(stages):
        older, place = divmod(ahead * (stages - 1 - stage.rank) - 1, microbatches)
        batches = range(-1 - older, 0) or (0,)  # the last rank finishes a batch in its own period
        backwards = [Action(Op.B, stage, Unit(t * microbatches, microbatches)) for t in batches]
        forwards = [pass_of(Op.F, k, stage) for k in range(microbatches)]
        periods.append([*forwards[: place + 1], backwards[0], *forwards[place + 1 :]])
        epilogues.append(backwards if older >= 0 else [])
    return make_order(periods, epilogues)


def version_difference(stages: int, microbatches: int, ahead: int = 2) -> int:
    """Return v, the version difference of the stages when a backward begins: 1 if all have made all earlier updates.

    With a slot for each forward and each backward the backward of batch t begins on the last of p stages in slot
    p - 1 + n + t (n + 1), and on the first one in slot a (p - 1) + n + t (n + 1), with a = `ahead` more forwards per
    stage. So of the batches before t the last floor((a - 1) (p - 1) / (n + 1)) have not returned to the first stage by
    then, and v is one more. For a = 2 it is 1 from n = p - 1 on, as in the paper (p <= n + 1, sec. 3.6), whose
    v = floor((p + n - 2) / n) is larger in some other cases.
    """
    return 1 + (ahead - 1) * (stages - 1) // (microbatches + 1)


def one_version_fault(stages: int, microbatches: int, ahead: int = 2) -> str | None:
    """Return why backwards begin while stages differ by more than one update, or None if they do not."""
    v, least = version_difference(stages, microbatches, ahead), max((ahead - 1) * (stages - 1), 1)
    if v == 1:
        return None
    given = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
    missing = f"last {v - 1} updates" if v > 2 else "last update"
    more = f" with ahead={ahead}" if ahead != 2 else ""
    return (
        f"with {stages} stages and {given} per batch, the backward of a batch begins before the first stage has made "
        f"the {missing}, but all passes must read the newest weights of all stages; {stages} stages{more} need at "
        f"least {least} microbatches ({'p <= n + 1' if ahead == 2 else '(ahead - 1) (p - 1) <= n'}): raise "
        f"microbatches to {least}"
    )
