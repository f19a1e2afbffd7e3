"""Calls an order function, and brings what a user's own returns into the form of an order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.checks import check_whole
from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.in_flight_option import AUTO, AUTO_DELAYED, check_in_flight
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
from penstock.schedule.ir.schedule import Action, Op, format_action, passes, split_fused, straight
from penstock.schedule.orders import ASK_LINKS, CHAINS, IN_ARRAYS, ORDERS
from penstock.schedule.orders.without_auto import auto_refused
from penstock.schedule.text_parser import parse_action


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
