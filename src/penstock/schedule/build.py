"""Builds and proves the schedule of a method, or of a user's order function."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.checks import check_whole, did_you_mean, is_whole
from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.add_options import with_window
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED, check_in_flight, in_flight_on
from penstock.schedule.ir.limits import check_sizes
from penstock.schedule.ir.op_table import PASSES
from penstock.schedule.ir.order import (
    NO_OPTIONS,
    Options,
    Order,
    OrderFunction,
    check_options,
    make_order,
    order_name,
    order_options,
)
from penstock.schedule.ir.schedule import Action, Op, Schedule, format_action, passes, split_fused, straight
from penstock.schedule.ir.sharding import Sharding, read_sharding
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.compatibility import compatible, sharding_of
from penstock.schedule.methods.corrections import CorrectionSpec
from penstock.schedule.methods.find_method import find_method
from penstock.schedule.methods.method import Method
from penstock.schedule.methods.table import METHODS
from penstock.schedule.orders import ASK_LINKS, CHAINS, IN_ARRAYS, ORDERS
from penstock.schedule.orders.without_auto import auto_refused
from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_action
from penstock.schedule.transforms.apply_version_rule import apply_rule
from penstock.schedule.transforms.batch_ops import (
    with_decisions,
)
from penstock.schedule.transforms.sharding import with_sharding


def prove(
    method: str | Method | OrderFunction,
    stages: int,
    microbatches: int,
    *,
    rule: str | None = None,
    order: str | OrderFunction | None = None,
    options: Options = NO_OPTIONS,
    decides: bool = False,
    window: int | None = None,
    sharding: str | Sharding | None = None,
) -> Proof:
    """Build a schedule and prove it; the arguments are those of a `ScheduleRequest`.

    Raises:
        ConfigError: unknown method, order or rule, or choices that cannot go together.
        ScheduleError: the schedule is wrong; where only m is too small, the message names the smallest legal m.
    """
    return ScheduleRequest(method, stages, microbatches, rule, order, options, decides, window, sharding).prove()


@dataclass(frozen=True)
class ScheduleRequest:
    """The schedule that a user asks for: built when it is first looked at, and proven when that is asked for.

    A schedule is built in a moment. Its proof takes longer, and the search for the smallest legal number of
    microbatches, if it fails, as long as many proofs; so whatever else may be wrong is best looked for before.

    Attributes:
        method: a row of the method table, by its name or itself, or a function (stages, microbatches) -> order, which
            may return an `Order` or simply, per rank, the passes of one flushed batch as text: ``["F0 F1 B0 B1", "F0 B0
            F1 B1"]``.
        stages: d, the number of stages of the model.
        microbatches: m, microbatches per batch.
        rule: another version rule than the method's (for a function: "flush" unless told otherwise).
        order: another order than the method's.
        options: of the order, such as {"chunks": 4}.
        decides: updates wait for a decision of all stages (the global norm, a vote on overflow).
        window: messages that may be outstanding on a lane from one rank to another, on either side, each of which is
            memory; the least that costs no time if None, when a forward takes 1, a backward 2 and messages take none.
            Where messages take time, `simulate_schedule` says how many it takes.
        sharding: what parallel pipelines split of the state of a stage: "none", "optimizer", "gradients" or "full",
            also with options, as in "full:weights=3"; that of the method if None.
    """

    method: str | Method | OrderFunction
    stages: int
    microbatches: int
    rule: str | None = None
    order: str | OrderFunction | None = None
    options: Options = field(default_factory=lambda: NO_OPTIONS)
    decides: bool = False
    window: int | None = None
    sharding: str | Sharding | None = None

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule, not proven yet.

        Raises:
            ConfigError: unknown method, order or rule, or choices that cannot go together.
            ScheduleError: the order cannot be made with these numbers.
        """
        return _build(self)

    def prove(self) -> Proof:
        """The proof of the schedule.

        Raises:
            ConfigError: as `schedule`.
            ScheduleError: the schedule is wrong; where only m is too small, the message names the smallest legal m.
        """
        schedule = self.schedule
        try:
            return check(schedule)
        except ScheduleError as error:
            legal = smallest_microbatches(
                self.method,
                self.stages,
                rule=self.rule,
                order=self.order,
                options=self.options,
                decides=self.decides,
                window=self.window,
                beyond=self.microbatches,
                sharding=self.sharding,
            )
            fewer = _most_in_flight(self)
            if legal is None and fewer is None:
                raise
            lower = f"lower in_flight from {self.options.get('in_flight')} to {fewer}"
            if legal is None:
                begin = f"{schedule.name} with {self.stages} stages and {self.microbatches} microbatches per batch: "
                said = str(error).splitlines()[0]
                raise ScheduleError(
                    f"{'' if said.startswith(schedule.name) else begin}{said}; with fewer microbatches in flight it "
                    f"runs: {lower}"
                ) from None
            ours = not callable(self.method) and not callable(self.order)
            need = f"needs at least {legal}" if ours else f"cannot run with the given microbatches, but with {legal}"
            why = _WHY_MORE.get(schedule.rule, "") if ours else f". ({error})"
            raise ScheduleError(
                f"{schedule.name} with {self.stages} stages {need} microbatches per batch, got {self.microbatches}; "
                f"raise microbatches to {legal}{'' if fewer is None else f', or {lower}'}{why}"
            ) from None


def _most_in_flight(asked: ScheduleRequest) -> int | None:
    """Return the most microbatches in flight that an order runs with; None where it was asked for no such number."""
    given = asked.options.get("in_flight")
    if not is_whole(given):
        return None

    def fails(n: int) -> bool:
        try:
            check(_build(replace(asked, options={**asked.options, "in_flight": n})))
        except ScheduleError:
            return True
        return False

    return bisect_left(range(1, given), True, key=fails) or None


def enough_in_flight(asked: ScheduleRequest) -> int | None:
    """Return how many microbatches in flight give the same order, where more than that were asked for; else None."""
    given, m = asked.options.get("in_flight"), asked.microbatches
    most = max(given) if isinstance(given, Sequence) and not isinstance(given, str) else given
    if not is_whole(most) or most <= (m if asked.stages > 1 else 1) or callable(asked.method) or callable(asked.order):
        return None

    def same(n: int) -> bool:
        fewer = tuple(min(n, each) for each in given) if isinstance(given, Sequence) else n
        schedule = _build(replace(asked, options={**asked.options, "in_flight": fewer}))
        return schedule.actions_hash == asked.schedule.actions_hash

    return bisect_left(range(1, most), True, key=same) + 1 if same(most - 1) else None


_WHY_MORE = {
    rule: f". (With fewer, the first stage begins a batch before the backwards of the batch {before} before it have "
    "ended, whose update makes the weights for it.)"
    for rule, before in (("double-buffer", "two"), ("triple-buffer", "three"))
}
"""Why a method needs so many microbatches, by its version rule, where that can be said in a sentence."""


def smallest_microbatches(
    method: str | Method | OrderFunction,
    stages: int,
    *,
    rule: str | None = None,
    order: str | OrderFunction | None = None,
    options: Options = NO_OPTIONS,
    decides: bool = False,
    window: int | None = None,
    beyond: int = 0,
    sharding: str | Sharding | None = None,
) -> int | None:
    """Find the smallest legal number of microbatches above `beyond`.

    None if there is none among those up to 4 per stage, or the next 4. One number after the other is tried: some orders
    take even numbers only, a user's function may do anything. Those with which more are in flight than the version rule
    allows are passed over, where that many are known: in endless 1F1B and its like.
    """

    def legal(m: int) -> bool:
        try:
            check(_build(ScheduleRequest(method, stages, m, rule, order, options, decides, window, sharding)))
        except (Exception, SystemExit):  # a user's function may refuse some m in its own way
            return False
        return True

    row = None if callable(method) else find_method(method)
    in_flight = _in_flight(order or (row and row.order), stages, options)
    known = RULES.get(rule or (row.rule if row else "flush"))
    first = max(beyond + 1, known.least_microbatches(in_flight) if known else 1)
    return next(filter(legal, range(first, max(4 * stages, first + 3) + 1)), None)


def _in_flight(order: object, stages: int, options: Options) -> int:
    """Return the microbatches in flight on the first rank of endless 1F1B and its like; of other orders at least 1."""
    asked = options.get("in_flight")
    if order == "endless-1f1b" and not isinstance(asked, str):
        return in_flight_on(stages, check_in_flight("in_flight", stages if asked is None else asked, stages))[0]
    return {"endless-1f1b": stages, "endless-eager-1f1b": 2 * stages - 1, "fine-grained": 2 * stages}.get(str(order), 1)


def _build(asked: ScheduleRequest) -> Schedule:
    method, order, rule = asked.method, asked.order, asked.rule
    choices: tuple[str | CorrectionSpec, str] = ("none", "reduce")
    limit, sharding = None, asked.sharding
    if callable(method):
        name, function, rule_name = getattr(method, "__name__", "order"), order or method, rule or "flush"
    else:
        row = find_method(method)
        name, function, rule_name = row.name, order or row.order, rule or row.rule
        choices = row.correction, row.combine
        limit = row.limit if order is None else None
        sharding = sharding_of(row, sharding, rule)
    if isinstance(function, str):
        if function not in ORDERS:
            raise ConfigError(f"unknown order {function!r}; known: {', '.join(ORDERS)}")
        function = ORDERS[function]
    if rule_name not in RULES:
        named = METHODS.get(rule_name)
        hint = f" It is a method, whose rule is {named.rule}." if named else did_you_mean(rule_name, RULES)
        raise ConfigError(f"unknown version rule {rule_name!r}.{hint} Known: {', '.join(RULES)}")
    own = f"method {name}" if order is None and not callable(method) else None
    made = call_order(function, asked.stages, asked.microbatches, asked.options, own)
    reason = compatible(made, RULES[rule_name], *choices)
    if reason is not None:
        raise ConfigError(f"{name}: {reason}")
    fault = limit(asked.stages, asked.microbatches, **asked.options) if limit is not None else None
    if fault is not None:
        raise ScheduleError(f"{name}: {fault}")
    schedule = apply_rule(made, RULES[rule_name], asked.microbatches, name)
    if asked.window is not None:
        schedule = with_window(schedule, asked.window)
    if sharding is not None:
        schedule = with_sharding(schedule, read_sharding(sharding))
    return with_decisions(schedule) if asked.decides else schedule


def call_order(
    function: OrderFunction,
    stages: int,
    microbatches: int,
    options: Options = NO_OPTIONS,
    asked: str | None = None,
) -> Order:
    """Call an order function and bring what it returns into the form of an `Order`.

    `asked` is the method whose order it is, if one was asked for by its name.

    Raises:
        ConfigError: a number is not positive, or the order does not have such an option.
        ScheduleError: the function returned something that is not an order.
    """
    name, given = order_name(function, ORDERS), options.get("in_flight")
    auto = given in (AUTO, AUTO_DELAYED)
    if auto and function not in ASK_LINKS:
        raise ConfigError(auto_refused(asked or f"order {name}", name, given))
    check_options(function, options, ORDERS, asked)
    defaults, ours = order_options(function), function in ORDERS.values()
    if auto:  # no links are known: messages take no time
        options = {option: value for option, value in options.items() if option != "in_flight"}
    elif given is not None and function in CHAINS:
        options = {**options, "in_flight": check_in_flight(f"{name}: in_flight", given, stages)}
    for what, value in (("stages", stages), ("microbatches", microbatches), *options.items()):
        if isinstance(value, tuple) and function in CHAINS:
            continue
        least = 0 if what in options and (not ours or defaults[what] == 0) else 1
        check_whole(f"{name}: {what}", value, least)
    check_sizes(name, stages, microbatches, {**defaults, **options}, in_arrays=function in IN_ARRAYS)
    result: Any = function(stages, microbatches, **options)
    if isinstance(result, Order):
        return result
    if isinstance(result, Iterator):  # of a function that yields the passes of one rank after the other
        result = list(result)
    if not isinstance(result, Sequence) or isinstance(result, str):
        hint = "; end the function with return" if result is None else ""
        raise ScheduleError(
            f"{name}: expected an Order, or a list with the passes of each rank, got {result!r:.80}{hint}"
        )
    if len(result) != stages:
        raise ScheduleError(f"{name}: asked for {stages} stages, it returned the passes of {len(result)} ranks")
    ranks = [[_as_action(a, rank, name) for a in _split(actions, rank, name)] for rank, actions in enumerate(result)]
    for action in (p for actions in ranks for a in actions for p in passes(a) if p.op in PASSES):
        first, last = action.unit.microbatches[0], action.unit.microbatches[-1]
        if last >= microbatches or (first < 0 and action.op is Op.F):  # a backward may be of a batch before
            raise ScheduleError(
                f"{name}: rank {action.stage.rank}, {format_action(action, relative=True, stage=False)}: a batch has "
                f"{microbatches} microbatches, numbered from 0 to {microbatches - 1}"
            )
    return make_order(ranks, [list(_drain(actions, microbatches)) for actions in ranks], stages=straight(len(result)))


def _drain(period: Sequence[Action], microbatches: int) -> Iterator[Action]:
    """Yield what a rank has left when a span ends: passes of batches before, as they would come in later periods."""
    late = [p for p in split_fused(period) if p.op in PASSES and p.unit.first < 0]
    for later in range(max((-(p.unit.first // microbatches) for p in late), default=0)):
        yield from (p for p in (_later(p, later, microbatches) for p in late) if p.unit.first < 0)


def _later(action: Action, batches: int, microbatches: int) -> Action:
    """Return a pass as it is so many batches later, numbered as before."""
    unit = action.unit._replace(first=action.unit.first + batches * microbatches)
    reads = action.reads and action.reads._replace(versions=tuple(v + batches for v in action.reads.versions))
    return action._replace(unit=unit, reads=reads)


def _split(actions: object, rank: int, name: str) -> Iterable[object]:
    if isinstance(actions, str):
        return actions.split()
    if not isinstance(actions, Iterable):
        raise ScheduleError(f"{name}: expected the passes of rank {rank}, got {actions!r:.80}")
    return actions


def _as_action(action: object, rank: int, name: str) -> Action:
    if isinstance(action, Action):
        return action
    if not isinstance(action, str):
        raise ScheduleError(f"{name}: expected a pass on rank {rank}, such as 'F0', got {action!r:.80}")
    try:
        return parse_action(action, straight(rank + 1), rank)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: rank {rank}: {error}") from None
