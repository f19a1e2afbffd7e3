"""Snapshots of a whole pipeline, and loading of saved states."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.checks import in_brief
from penstock.errors import ConfigError
from penstock.runtime.engine.lifecycle import between_runs
from penstock.runtime.rank.snapshot import Saving, Snapshot
from penstock.runtime.restore.restore_together import restore_all
from penstock.runtime.restore.saved_state import PREDICTION, SavedState, check_names, check_pipelines, saved_older
from penstock.runtime.switching import Switching
from penstock.schedule.ir.version_rules import RULES
from penstock.weights.corrections.two_bw_ahead import prediction_of

_LOG = logging.getLogger(__name__)
IN_FLIGHT = "in_flight"  # among the facts of a saved state


class SavedStates(Switching):
    """The part of `Pipeline` that saves its state, and continues from one."""

    @between_runs()
    def snapshots(self) -> list[Snapshot]:
        """Return a snapshot of every stage in this process, between two runs; together they are a saved state.

        Raises:
            ConfigError: another process has trained the stages here further, for another pipeline of the model.
        """
        self._held.check()
        found: list[Snapshot] = []
        for snapshot in self._engine.snapshots():
            self._sink(found.append, snapshot)
        return found

    def _sink(self, sink: Callable[[Snapshot], None], snapshot: Snapshot, *, shares: bool = False) -> None:
        """Hand on a snapshot, with the microbatches in flight that have been found; see `Saving` for `shares`."""
        if not shares:
            snapshot.own()
        known = self._adaptations.state()
        snapshot.facts.update({IN_FLIGHT: known} if known else {})
        prediction = self._prediction()
        snapshot.facts.update({PREDICTION: prediction} if prediction else {})
        sink(snapshot)

    @between_runs()
    def load(self, saved: SavedState) -> None:
        """Continue from a saved state, bit for bit; it may be of another depth, width or method.

        The data of the next run are those that follow (``itertools.islice(loader, pipeline.batches, None)``, if it
        goes through them in one order). Under another method, training begins with the newest weights of the state, as
        after a synchronous run, and takes older versions over as `switch` does. A parameter that was frozen then and is
        not now has the state of an optimizer that is new to it; one that is frozen now has its newest weights.
        `Checkpoints.load` calls this. Between processes all ranks call it together: with sharding each reads the rows
        that it owns, and has the others from those that have read them.

        Raises:
            ConfigError: this is no saved state.
            CheckpointError: something is missing, or of another shape, or of a block that the model does not have.
        """
        if not isinstance(saved, SavedState):
            raise ConfigError(
                f"load takes a state that was saved with its facts, not {in_brief(saved)}; to load a checkpoint: "
                "penstock.Checkpoints(pipeline, folder).load(); to begin with other weights: "
                "pipeline.load_state_dict(weights)"
            )
        check_names(saved, self._given[1])
        check_pipelines(saved, self.combine, self.grid.width)
        self._adaptations.load(saved.facts.get(IN_FLIGHT, {}))
        self._adopt()
        self._held.loaded()
        older = min(saved_older(saved, self._prediction()), RULES[self.schedule.rule].delay)
        try:
            restore_all(saved, older, self._given[1], self._ranks, self.grid, self.schedule)
            for state in self._ranks:
                key = state.decisions.key if state.decisions.key in saved.facts else "decisions"
                state.decisions.load(int(saved.facts["batch"]), saved.facts[key])
                for stage in state.stages.values():
                    stage.weights.decided(state.decisions.mean)
        except BaseException as error:
            self._spans.life.broken = error  # half of it may have been loaded
            raise
        self._spans.batches, self._spans.older = int(saved.facts["batch"]), older
        self._spans.evaluated = max((e.version for e in self.evaluations), default=-1)
        self._tell_what_is_not_finite()

    def _prediction(self) -> list[float | None] | None:
        return prediction_of(self._plan.options.staleness.correction, RULES[self.schedule.rule].delay)

    def _tell_what_is_not_finite(self) -> None:
        """Warn if weights that have been loaded are not finite, which a run may have saved on purpose."""
        stages = [stage for state in self._ranks for stage in state.stages.values()]
        if found := list(dict.fromkeys(name for stage in stages for name in stage.weights.not_finite())):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            _LOG.warning(
                "load: after %d batches %s%s had infinities or NaN; what is trained from there has, too. If there is "
                "an earlier checkpoint, checkpoints.load(limit=%d) goes on from it, and removes this one",
                self.batches, found[0], more, self.batches - 1,
            )  # fmt: skip


@between_runs()
def save_between_runs(pipeline: SavedStates, saving: Saving) -> None:
    """Hand a snapshot of every stage in this process to the sink of `saving`, between two runs."""
    for snapshot in pipeline._engine.snapshots():
        pipeline._sink(saving.sink, snapshot, shares=saving.shares)


def check_fresh(pipeline: SavedStates) -> None:
    """Make sure that a pipeline has the weights to save; this is no collective call.

    Raises:
        ConfigError: another process has trained the stages here further, for another pipeline of the model.
    """
    pipeline._held.check()


def check_idle(pipeline: SavedStates, instead: str = "") -> None:
    """Make sure that a pipeline is between two runs; this is no collective call.

    Args:
        pipeline: which.
        instead: what to write within a run, for the message.

    Raises:
        PenstockError: a run is under way, or the pipeline broke in an earlier one.
    """
    pipeline._spans.life.check_idle(instead)
