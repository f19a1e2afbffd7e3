"""What stages share begins with one value: that of the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.ranks import Holder, Team
from penstock.errors import ConfigError
from penstock.partition.tied import Tie
from penstock.runtime.rank.batch_source import checksum
from penstock.runtime.rank.rank import Worker
from penstock.schedule.ir.schedule import Schedule
from penstock.stage.node import NodeRuntime

_TAG = 7  # on the pipelines' group; lanes use others


def equalise(ties: Sequence[Tie], schedule: Schedule, team: Team, workers: Sequence[Worker]) -> None:
    """Give the copies of shared parameters the value that the first stage has; all processes call this together.

    Raises:
        ConfigError: their shapes differ.
        TransportError: a peer is dead.
    """
    for tie in ties:
        here = {Holder(w.seat.replica, n): w.nodes[n] for w in workers for n in w.nodes if n.cut in tie.cuts}
        found: list[tuple[int, Any]] = [(h.node.cut, _shapes(tie, h.node.cut, node)) for h, node in here.items()]
        if team.group is not None:
            parts = gather_json(found, "comparing shared parameters", team.control)
            found = [(cut, shapes) for part in parts for cut, shapes in part]
        for cut, shapes in found:
            if isinstance(shapes, str):
                raise ConfigError(shapes)
            if shapes != found[0][1]:
                raise ConfigError(
                    f"{', '.join(tie.names_at(cut))} of stage {cut} have shapes {shapes}, of stage {found[0][0]} "
                    f"{found[0][1]}; what is one parameter has one shape"
                )
        first, *others = tie.cuts
        for replica, place, cut in product(team.replicas, range(schedule.replicas), others):
            if (first, place) not in schedule.node_at:
                continue
            source, target = (Holder(replica, schedule.node_at[c, place]) for c in (first, cut))
            _copy(tie, source, target, here, team)
            other = here.get(target)
            if other is not None and other.store is not None:
                other.store.refresh()


def follow_first(workers: Sequence[Worker]) -> None:
    """Stages of one process that hold the same cut take over what users have written into the first one's weights."""
    stores = [(node.cut, r.place, r.store) for w in workers for node, r in w.nodes.items() if r.store is not None]
    first = {cut: store.master for cut, place, store in stores if place == 0}
    for cut, place, store in stores:
        if place == 0 or cut not in first:
            continue
        for mine, wanted in zip(store.master.flats, first[cut].flats, strict=True):
            if not torch.equal(mine, wanted):
                store.master.rewrite()
                mine.copy_(wanted)


def check_equal(schedule: Schedule, team: Team, workers: Sequence[Worker]) -> None:
    """Make sure that stages in different processes that hold one cut begin with the same weights and buffers.

    Raises:
        ConfigError: they do not.
        TransportError: a peer is dead.
    """
    if team.width * schedule.replicas == 1 or team.group is None:
        return
    mine = [(n.cut, checksum(sorted(r.stage.state().items()), None)) for w in workers for n, r in w.nodes.items()]
    found = gather_json(mine, "comparing parallel pipelines", team.control)
    first: dict[int, tuple[int, int]] = {}
    for rank, part in enumerate(found):
        for cut, value in part:
            other, wanted = first.setdefault(cut, (rank, value))
            if value != wanted:
                raise ConfigError(
                    f"stage {cut} does not begin with the same weights on ranks {other} and {rank}; seed torch alike "
                    "on all ranks before the blocks are made, or let them be made lazily"
                )


def _shapes(tie: Tie, cut: int, node: NodeRuntime) -> list[list[int]] | str:
    """The shapes of shared parameters on a stage, or what is wrong there, which every rank must hear of."""
    try:
        return [list(view.shape) for view in _values(tie, cut, node)]
    except ConfigError as error:
        return str(error)


def _values(tie: Tie, cut: int, node: NodeRuntime) -> list[Tensor]:
    """The present values of shared parameters on a stage."""
    names, trained = tie.names_at(cut), node.stage.trained
    missing = [name for name in names if name not in trained]
    if missing or node.store is None:
        raise ConfigError(f"tied: {node.stage.where} trains no parameter {missing[0] if missing else names[0]!r}")
    views = node.store.master.views
    return [views[name] for name in names]


def _copy(tie: Tie, source: Holder, target: Holder, here: Mapping[Holder, NodeRuntime], team: Team) -> None:
    """Copy the values of the first stage to another one, in this process or between two."""
    owner, other = here.get(source), here.get(target)
    first, cut = source.node.cut, target.node.cut
    with torch.no_grad():
        if owner is not None and other is not None:
            for mine, theirs in zip(_values(tie, first, owner), _values(tie, cut, other), strict=True):
                theirs.copy_(mine)
        elif owner is not None:
            for mine in _values(tie, first, owner):
                dist.send(mine.cpu(), group=team.control, tag=_TAG, group_dst=team.process(target))
        elif other is not None:
            for theirs in _values(tie, cut, other):
                received = torch.empty(theirs.shape, dtype=theirs.dtype)
                dist.recv(received, group=team.control, tag=_TAG, group_src=team.process(source))
                theirs.copy_(received)
