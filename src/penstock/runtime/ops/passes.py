"""Passes on microbatches: F, B, I, W, R and PREDICT, also on sharded weights and on undecided versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.comm.core.ticket import Wait
from penstock.comm.p2p.tensor_message import Header
from penstock.errors import DataError, TransportError
from penstock.runtime.data.batch_source import EVALUATE, Sample, could_not, failed_elsewhere
from penstock.runtime.ops.bound import BoundAction, Turn
from penstock.runtime.ops.messages import Consumer
from penstock.runtime.rank.span import RankSpan
from penstock.runtime.update.stop_request import end_of
from penstock.schedule.ir.schedule import Kind, Op
from penstock.schedule.machine.instructions import Instruction
from penstock.stage.blocks.loss import UnreadLoss
from penstock.stage.blocks.rng import RngKey
from penstock.stage.in_flight_microbatch import Microbatch
from penstock.stage.stage_passes import Passed
from penstock.timeline import Waiting

_NO_GRADIENTS: tuple[bool, ...] = ()
_NO_SAMPLE = Sample(None, None, 0)
_NO_LOSS = UnreadLoss(0.0, 0.0)
_ADDING = (Op.B, Op.I, Op.W)


class Forward(Consumer):
    """A forward of a stage; subclasses say whether a backward follows."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        self._slice, runtime = self.action.unit.slice, self._runtime
        self._number = self._slice[0] if self._slice else 0
        self._routes = self.stage.routes
        self._has_loss = runtime.module.has_loss
        self._reads = self._routes.enters or self._has_loss

    def begins_backward(self, after: BoundAction) -> bool:
        """Whether the pass behind it goes back from its loss."""
        return self._has_loss and after.stage is self.stage

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it at once where everything is there, and it is not the first forward of its batch on the stage."""
        if self.stage.begun < self._span.start + t + self._offset:
            return self._begin_batch(t)
        return super().run(t)

    def _begin_batch(self, t: int) -> Iterator[Wait]:
        yield from self._span.begin_batch(self.stage, self._span.start + t + self._offset)
        yield from super().run(t) or ()

    def work(self, turn: Turn) -> float | None:
        """Run the blocks and lay their output ready."""
        routes, k, start = self._routes, turn.first, None
        sample: Sample | None = _NO_SAMPLE
        more = False
        if self._reads:
            sample, more = self._read(k)
            start = self._recorder.begin()
        if routes.enters:
            checksum = 0 if sample is None else sample.checksum
            wants, header = _NO_GRADIENTS, Header(turn.batch, k, more, checksum, piece=self._number)
            value = sample and sample.input
        else:
            header, value, wants = routes.inputs((k, self._number))
        if sample is None or header.stop:
            self._pass_by(turn, header, value)
        else:
            self._pass_on(turn, header, value, wants, sample)
        return start

    def _pass_on(self, turn: Turn, header: Header, value: Any, wants: tuple[bool, ...], sample: Sample) -> None:
        """Run the blocks on an input."""
        span, stage, routes, k = self._span, self.stage, self._routes, turn.first
        if routes.enters:
            value = self._runtime.module.take(routes.own_input(value))
        if self._has_loss and header.checksum and sample.checksum and header.checksum != sample.checksum:
            raise DataError(
                f"{self._object(turn)} is not the same on the first and the last stage; every rank must see the same "
                "samples in the same order (no DistributedSampler, and a generator with the same seed where a "
                "DataLoader shuffles)"
            )
        span.more = header.more  # no older batch comes later: all forwards of a period are of its own (`check_offered`)
        if span.provisional and stage.books.provisional:
            self._runtime.passes.graphs.begin_draft()
            stage.drafts[k, self._number] = Draft(header, value, wants, sample.target)
        output, loss, auxiliary = self.compute(turn, value, wants, sample.target)
        header, loss = self._runtime.passes.beside_loss((k, self._number), header, loss, auxiliary)
        if loss is not None and stage.is_last:
            span.losses.add(turn.batch, (k, self._number), loss if sample.counts else _NO_LOSS)
        if self._runtime.module.hands_on:
            routes.put_output(header, output)
        span.reports.forward_done(turn.batch, evaluation=self._evaluates)

    def _pass_by(self, turn: Turn, header: Header, value: Any) -> None:
        """Do without data; only evaluations can."""
        raise NotImplementedError

    def compute(self, turn: Turn, value: Any, wants: tuple[bool, ...], target: Any) -> Passed:
        """Run the blocks; returns their output, the loss where there is one, and auxiliary losses."""
        raise NotImplementedError

    def draw(self, turn: Turn) -> RngKey:
        """What the random numbers of the microbatch depend on."""
        return RngKey(turn.batch, self._span.pipeline * self._m + turn.first % self._m, self._number)

    def _read(self, k: int) -> tuple[Sample | None, bool]:
        """Read a microbatch, and whether another batch follows; for the trace that is no work of the stage."""
        recorder, source, enters = self._recorder, self._span.source, self._routes.enters
        start = recorder.now()
        sample = source.sample(self._span.pipeline, k)
        more = enters and source.follows(k // self._m + 1)
        end, label, index = recorder.now(), f"read sample {k}", self.action.stage.index
        recorder.add("compute", start, end, Waiting.DATA, label, index, cause="the data")
        if self._slice is None:
            return sample, more
        own, target = (
            self._span.options.partition.slicing.part(tree, self._slice) for tree in (sample.input, sample.target)
        )
        return sample._replace(input=own, target=target), more


class TrainingForward(Forward):
    """A forward that a backward follows."""

    def compute(self, turn: Turn, value: Any, wants: tuple[bool, ...], target: Any) -> Passed:
        """Run the blocks and keep what the backward needs."""
        scale = self._span.decisions.scale(turn.batch) if self._has_loss else 1.0
        microbatch = Microbatch(turn.first, self.draw(turn), target, scale, self._slice)
        copy = None if self._derive is None else self.copy(turn)
        return self._runtime.passes.forward(microbatch, value, wants, turn.version, copy)


class UntrainedForward(Forward):
    """A forward of a stage that is not trained."""

    def compute(self, turn: Turn, value: Any, wants: tuple[bool, ...], target: Any) -> Passed:  # noqa: ARG002
        """Run the blocks and keep nothing."""
        return self._runtime.passes.pass_on(Microbatch(turn.first, self.draw(turn), target), value)


class EvaluationForward(Forward):
    """A forward of an evaluation; where it fails, all stages behind hear of it and run nothing, and nothing is lost."""

    def _read(self, k: int) -> tuple[Sample | None, bool]:
        """Read a microbatch, and whether another batch follows; None where it cannot be read."""
        source, enters = self._span.source, self._routes.enters
        if source.failure is not None and not enters:
            return None, False
        try:
            return super()._read(k)
        except Exception as error:
            source.fail(error)
            return None, enters and source.follows(k // self._m + 1)

    def _pass_on(self, turn: Turn, header: Header, value: Any, wants: tuple[bool, ...], sample: Sample) -> None:
        """Run the blocks on an input, or hand on what they have raised; nothing once the evaluation has failed."""
        if self._span.source.failure is not None:
            self._pass_by(turn, header, value)
            return
        self._counts = sample.counts
        try:
            super()._pass_on(turn, header, value, wants, sample)
        except TransportError:  # a process that shares the stage is gone
            raise
        except Exception as error:
            self.note(turn, error)
            self._span.source.fail(error, could_not(self._recorder.rank, EVALUATE, error))
            self._pass_by(turn, header, value)

    def _pass_by(self, turn: Turn, header: Header, value: Any) -> None:
        """Hand on why there are no data."""
        span, source = self._span, self._span.source
        if header.stop:
            source.fail(failed_elsewhere(value), value)
        else:
            value = source.reason(self._recorder.rank)
        span.more = header.more
        if self._runtime.module.hands_on:
            self._routes.put_output(header._replace(stop=1), value)
        span.reports.forward_done(turn.batch, evaluation=True)

    def compute(self, turn: Turn, value: Any, wants: tuple[bool, ...], target: Any) -> Passed:  # noqa: ARG002
        """Run the blocks in evaluation mode and keep nothing."""
        passes, module = self._runtime.passes, self._runtime.module
        passed = passes.evaluate(Microbatch(turn.first, RngKey(-1, turn.first), target), value)
        if module.hands_on:
            self._routes.check_output(passed[0])
        if passes.predicted is not None and self.stage.is_last and self._counts:
            passes.predicted.setdefault(turn.batch, []).append(module.returned(passed[0]))
        return passed


def bind_forward(instruction: Instruction, span: RankSpan) -> Forward:
    """The forward that an instruction stands for."""
    if instruction.action.unit.kind is Kind.EVAL:
        return EvaluationForward(instruction, span)
    trained = span.stages[instruction.action.stage].trained
    return (TrainingForward if trained else UntrainedForward)(instruction, span)


class Backward(Consumer):
    """A backward for inputs and weights (B), or for the inputs only (I), of one or several microbatches."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        passes = self._runtime.passes
        self._run = passes.backward if self.op is Op.B else passes.backward_for_inputs

    def work(self, turn: Turn) -> float | None:
        """Run them one after the other, so that gradients are added in the order of the microbatches."""
        span, routes, version = self._span, self.stage.routes, turn.version
        start = self._wait_for_copies(turn)
        copy = None if self._derive is None else self.copy(turn)
        flights = self._runtime.passes.flights
        for k, piece in self._keys:
            k += turn.t * self._m
            batch = span.start + k // self._m
            weight, stop, auxiliary, gradients = routes.gradients((k, piece))
            span.losses.learn(batch, weight)
            if stop:
                span.stop.ask(end_of(batch, stop))
            flight = flights[k, piece]
            if gradients is not None:
                flight.auxiliary = auxiliary
            found = self._run((k, piece), batch, version, gradients, copy)
            # The weight of a batch is known to the last stage before its last backward, so it rides on gradients.
            known, asked = span.losses.weight(batch), span.stop.left(batch)
            header = Header(batch, k, span.more, 0, known, piece, asked, flight.auxiliary)
            routes.put_input_gradients(header, found)
        return start

    def _wait_for_copies(self, turn: Turn) -> float | None:
        """Have a device wait for activations that come back from the host; returns when its work can begin."""
        passes = self._runtime.passes
        keys = [(k + turn.t * self._m, piece) for k, piece in self._keys]
        copies = [copy for key in keys for copy in passes.graphs.arriving(passes.flights[key].work)]
        if not copies:
            return None

        def wait() -> None:
            for copy in copies:
                copy.settle()

        return self._recorder.wait_on_device(wait, f"copy {turn.label}", *self._place, turn.batch, turn.first)


class WeightBackward(Consumer):
    """The second half of a backward, for the weights only (W)."""

    def work(self, turn: Turn) -> None:
        """Run it."""
        key = turn.first, self._keys[0][1]
        self._runtime.passes.backward_for_weights(key, turn.batch, turn.version, self.copy(turn))


class RecomputeForward(Consumer):
    """A forward again, because only its input was kept (R)."""

    def work(self, turn: Turn) -> None:
        """Make the graphs again, and lay the output ready for the next stage of the segment."""
        span, routes, version = self._span, self.stage.routes, turn.version
        for k, piece in self._keys:
            k += turn.t * self._m
            again = self._runtime.passes.recompute((k, piece), version, routes.recomputed_input((k, piece)))
            routes.put_recomputed(Header(turn.batch, k, span.more, piece=piece), again)


class Predict(BoundAction):
    """Makes a derived copy of the weights for a microbatch (PREDICT)."""

    def work(self, turn: Turn) -> None:
        """Make it."""
        copy, span = self.copy(turn), self._span
        assert copy is not None
        batch = span.start + copy.first // self._m
        self._runtime.weights.predict(copy, self.versions(turn), batch, span.decisions.scaler.scale)


class _Held(Consumer):
    """A pass of a trained stage: it waits until its weights are whole and, if it adds to a gradient, there is room."""

    def __init__(self, instruction: Instruction, span: RankSpan) -> None:
        super().__init__(instruction, span)
        assert span.updates.gathers is not None, "only sharded schedules hold passes up"
        self._gathers, self._adds = span.updates.gathers, self.op in _ADDING

    def run(self, t: int) -> Iterator[Wait] | None:
        """Run it at once where everything is there."""
        if self._gathers.ready(self.action.stage, self._version(t), self._batch(t)):
            return super().run(t)
        return self._run_held(t)

    def _run_held(self, t: int) -> Iterator[Wait]:
        turn, version = self.turn(t), self._version(t)
        yield from self._span.complete(self.stage, str(turn), version)
        yield from self._gathers.before_pass(self.action.stage, version, self._batch(t), turn)
        yield from super().run(t) or ()

    def _version(self, t: int) -> int:
        return self._span.start + max(self._versions[0] + t, self._span.older)

    def _batch(self, t: int) -> int | None:
        return self._span.start + t + self._offset if self._adds else None


class HeldForward(_Held, TrainingForward):
    """A forward that a backward follows."""


class HeldBackward(_Held, Backward):
    """A backward, or its first half."""


class HeldWeightBackward(_Held, WeightBackward):
    """The second half of a backward."""


class HeldRecomputeForward(_Held, RecomputeForward):
    """A forward again."""


class Draft(NamedTuple):
    """The input of a forward that reads a version not decided on yet."""

    header: Header
    value: Any
    wants: tuple[bool, ...]
    target: Any


class Redo(Consumer):
    """A forward again, on the version that is decided on now (REDO)."""

    def work(self, turn: Turn) -> None:
        """Run it on what forwards before have made again, and lay the output ready."""
        span, runtime, key = self._span, self._runtime, (turn.first, 0)
        header, value, wants, target = self.stage.drafts.pop(key)
        value = self.stage.routes.repaired(key, value)
        scale = span.decisions.scale(turn.batch) if runtime.module.has_loss else 1.0
        draw = RngKey(turn.batch, span.pipeline * self._m + turn.first % self._m)
        microbatch = Microbatch(turn.first, draw, target, scale)
        output, loss, auxiliary = runtime.passes.forward(microbatch, value, wants, turn.version, self.copy(turn))
        header, loss = runtime.passes.beside_loss(key, header, loss, auxiliary)
        if loss is not None and self.stage.is_last:
            span.losses.add(header.batch, key, loss)
        if runtime.module.hands_on:
            self.stage.routes.put_output(header, output, repair=True)


class Validate(BoundAction):
    """The decision of all stages on a provisional version (VALIDATE)."""

    def run(self, t: int) -> Iterator[Wait]:
        """Wait for the decision, tell the books of it, then make the update again if it was another one."""
        turn = self.turn(t)
        yield from self._span.updates.wait(self.action.stage, turn.batch, self.op, turn.label)
        self._span.rejected = self._span.updates.rejects(self.action.stage, turn.batch)
        self.stage.books.reject(self._span.rejected)
        self.act(turn)

    def work(self, turn: Turn) -> None:
        """Settle the update."""
        decision = self._span.updates.validate(self._runtime, turn.batch)
        self._span.reports.decided(decision)
        if not self._span.rejected:
            for stage in self._span.stages.values():
                stage.drafts.clear()
