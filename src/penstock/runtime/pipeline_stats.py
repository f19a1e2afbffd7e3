"""What can be read off a pipeline: its events, memory and times."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.comm.collective.control_plane import gather_json
from penstock.comm.core.devices import allocator_peaks
from penstock.comm.core.trace_recorder import ON_THE_HOST, merge_recordings
from penstock.runtime.rank.timeline_files import write_recording
from penstock.runtime.sharded_state_dict import ShardedStateDict
from penstock.runtime.update.divergence import Trouble
from penstock.runtime.update.run_events import Evaluated
from penstock.schedule.ir.schedule import Stage
from penstock.stage.trained_stage_weights import TrainedWeights
from penstock.timeline import Timeline
from penstock.weights.decision import Decision
from penstock.weights.wave_synchronous_updates import WaveWeights

TOTAL_ON_DEVICE = "total on the device"


class Inspection(ShardedStateDict):
    """The part of `Pipeline` that changes nothing."""

    @property
    def batches(self) -> int:
        """The number of batches trained on."""
        return self._spans.batches

    @property
    def trouble(self) -> Trouble | None:
        """The first batch since `look_out` that has shown a divergence; None if none has.

        All ranks hear of the same one, but not at once. It is part of every snapshot that is taken afterwards.
        """
        return self._spans.reporter.decisions.detector.trouble

    def is_finite(self) -> bool:
        """Return whether the newest weights and the optimizer states in this process are free of infinities and NaN."""
        return not any(stage.weights.not_finite() for state in self._ranks for stage in state.stages.values())

    def lags(self) -> dict[str, dict[int, list[int]]]:
        """Return after how many waves the stages here have added the updates of others, where `Combine` left that open.

        By "pipeline/stage", the batch after which a wave ended, and pipeline, since the start of training (snapshots
        have it). What all processes have recorded makes a `lag` for `Combine` that repeats the run.
        """
        agreements = [stage.weights.agreement for state in self._ranks for stage in state.stages.values()]
        return {
            waves.place: dict(waves.record) for waves in agreements if isinstance(waves, WaveWeights) and waves.record
        }

    def decided(self) -> tuple[Decision, ...]:
        """Take the updates made or skipped since the last report; after a run, those of its last batches.

        Each is given out once, with a report or here, so that nothing is counted twice: a second call returns ().
        """
        return self._spans.reporter.decisions.events.take_decided()

    def evaluated(self) -> tuple[Evaluated, ...]:
        """Take what evaluations have found since the last report; each is given out once, as by `decided`."""
        return self._spans.reporter.decisions.events.take_evaluated()

    @property
    def evaluations(self) -> tuple[Evaluated, ...]:
        """All that evaluations in runs have found since the start of training, where all stages decide together.

        They are part of a snapshot: those that were known when the update before it was made.
        """
        return tuple(self._spans.reporter.decisions.events.evaluations)

    def optimizers(self) -> dict[Stage, torch.optim.Optimizer]:
        """The optimizers of the stages in this process; of the first pipeline, where it holds several.

        With sharding, their parameters are the rows of one pipeline.

        Rates and other settings of their parameter groups may be set between two runs, by hand or by a scheduler that
        is stepped there; checkpoints hold them. In one process other copies of the same stage take them over; between
        processes set the same on all ranks: a run refuses copies of a stage that differ, and says in the log where a
        rate was set on some ranks only.
        """
        found = {}
        for stage, runtime in self.stages.items():
            if isinstance(runtime.weights, TrainedWeights) and runtime.weights.updater.optimizer is not None:
                runtime.weights.updater.wait_for_copies()
                found[stage] = runtime.weights.updater.optimizer
        return found

    @property
    def doing(self) -> str:
        """What the rank of this process is doing, or waiting for, such as "F3 of stage 1"."""
        return str(self._spans.reporter.recorder.doing)

    def live_bytes(self) -> dict[int, dict[str, int]]:
        """Return live bytes by purpose, per rank of this process. Ranks count through all pipelines."""
        return {state.recorder.rank: dict(state.recorder.live) for state in self._ranks}

    def peak_bytes(self) -> dict[int, dict[str, int]]:
        """Return peak bytes by purpose, and of all together ("total"), per rank of this process.

        Where activations or optimizer states are moved to the memory of the host, "total on the device" is that of all
        others together.
        Where a rank computes on an accelerator, "device: allocated" and "device: reserved" are what torch's allocator
        says of the whole process there, workspaces of libraries and caches included.
        """
        found = {}
        for state in self._ranks:
            peaks = {**state.recorder.peak, "total": state.recorder.peak_total}
            if not ON_THE_HOST.isdisjoint(peaks):
                peaks[TOTAL_ON_DEVICE] = state.recorder.peak_on_device
            for device in {stage.module.device for stage in state.stages.values()}:
                peaks |= allocator_peaks(device)
            found[state.recorder.rank] = peaks
        return found

    def busy_seconds(self) -> dict[int, float]:
        """Return the seconds of work so far, per rank of this process."""
        return {state.recorder.rank: state.recorder.busy for state in self._ranks}

    def timeline(self) -> Timeline:
        """Return the timeline of all ranks; between processes a collective call, which all ranks make together.

        Every process receives all of it: with many ranks, write it instead. With tensor parallelism it is that of the
        processes of one tensor rank; what they add up within passes counts as work.
        """
        parts = [state.recorder.recording() for state in self._ranks]
        if self.grid.group is not None:
            gathered = gather_json(parts, "gathering the timeline", self.grid.control)
            parts = [part for others in gathered for part in others]
        return merge_recordings(parts, self.grid.width * self.grid.depth)

    def write_timeline(self, folder: Path | str) -> None:
        """Write the timeline of each rank of this process into a folder, from where `read_timeline` merges all.

        No collective call: read only when all ranks have written. Of processes that share stages by tensor parallelism
        the first writes.

        Args:
            folder: that all ranks can access, such as that of the run.

        Raises:
            OSError: it cannot be written.
        """
        for state in () if self.grid.tensor.index else self._ranks:
            write_recording(Path(folder), state.recorder, self.grid.width * self.grid.depth)
