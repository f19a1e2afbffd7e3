"""What is written into the weights of parallel pipelines with weights of their own, between two runs."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.comm.collective.gather import gather_json
from penstock.comm.core.rank_grid import RankGrid
from penstock.errors import ConfigError
from penstock.runtime.setup.rank_state import RankState
from penstock.schedule.methods.combine import Combine


def check_written(combine: Combine, grid: RankGrid, ranks: Sequence[RankState]) -> None:
    """Make sure that all pipelines have been given the same, if they are to begin anew from what was written.

    Raises:
        ConfigError: they have not, so that they would have nothing in common.
        TransportError: a peer is dead.
    """
    if not combine.apart:
        return
    watches = [(n.index, r.agreement.watch) for w in ranks for n, r in w.stages.items() if r.agreement is not None]
    found = [[index, watch.taken_over, watch.seen] for index, watch in watches]
    for _, watch in watches:
        watch.taken_over = False
    parts = [found] if grid.group is None else gather_json(found, "comparing parallel pipelines", grid.control)
    everywhere = [tuple(one) for part in parts for one in part]
    for index in sorted({index for index, taken_over, _ in everywhere if taken_over}):
        if len({seen for other, _, seen in everywhere if other == index}) > 1:
            raise ConfigError(
                f"weights of stage {index} were written into between two runs, but not the same into those of all "
                f"{grid.width} pipelines, which have weights of their own with combine.kind={combine.kind}: write the "
                "same on all ranks, or load a checkpoint (Pipeline.load), or make a new Pipeline of these weights"
            )
