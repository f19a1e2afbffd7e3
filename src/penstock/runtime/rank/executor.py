"""One rank at work: it runs its instructions in order and yields where it has to wait.

The executor is a generator. It yields a `Wait` when it needs a message that is not there, and a `Report` when the loss
of a batch is known; whoever drives it (one process for all ranks, or one process each) decides how to wait. It plays
the schedule's own books (`penstock.schedule.proof.stage_state`) along: they tell which versions are alive, and refuse
at once whatever the proof would have refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from penstock.comm.communicators import Links
from penstock.comm.core.rank_grid import Holder
from penstock.comm.core.wait import Wait
from penstock.comm.p2p.mailbox import Mailbox
from penstock.comm.p2p.message import Header
from penstock.comm.p2p.routing import Gradients, Joints
from penstock.errors import DataError
from penstock.runtime.rank.activation_exchange import Lending
from penstock.runtime.rank.batch_source import BatchSource, Sample
from penstock.runtime.rank.memory_ledger import Account
from penstock.runtime.rank.rank_state import RankState
from penstock.runtime.rank.reports import Report, Reporting
from penstock.runtime.rank.snapshot import Saving
from penstock.runtime.rank.snapshot_capture import Keeping
from penstock.runtime.update.averaging import Combining, Meetings, Party
from penstock.runtime.update.tied_gradients import Tying
from penstock.runtime.update.update_step import Updates
from penstock.runtime.update.waves import WaveCombining
from penstock.schedule.ir.rules import RULES
from penstock.schedule.ir.schedule import Action, Copy, Kind, Op, Payload, Stage, existing, format_unit
from penstock.schedule.machine.instructions import Instruction, Lowered, Message
from penstock.schedule.methods.combine import REDUCE, Combine
from penstock.schedule.proof.in_flight import Piece
from penstock.schedule.proof.stage_spec import StageSpec
from penstock.schedule.proof.stage_state import StageState
from penstock.stage.graphs import Loss
from penstock.stage.in_flight import Microbatch
from penstock.stage.precision import cast
from penstock.stage.rng import Draw
from penstock.stage.stage_runtime import StageRuntime
from penstock.timeline import Interval, Waiting


class Draft(NamedTuple):
    """What a forward has worked on that reads a version not decided on yet."""

    header: Header
    value: Any
    wants: tuple[bool, ...]
    target: Any


NO_GRADIENTS: tuple[bool, ...] = ()
NO_SAMPLE = Sample(None, None, 0)


class Executor:
    """Runs one rank.

    Args:
        state: its stages, its record, its part in decisions.
        lowered: the schedule with its messages.
        specs: what the books of each stage on this rank need to know.
        holders: by stage index, the copies of that stage in all parallel pipelines.
        links: to the others.
        combine: how parallel pipelines agree.
    """

    def __init__(
        self,
        state: RankState,
        lowered: Lowered,
        specs: dict[Stage, StageSpec],
        holders: Mapping[int, tuple[Holder, ...]],
        links: Links,
        combine: Combine = REDUCE,
    ) -> None:
        self.lowered, self.specs, self.stages, self.links = lowered, specs, state.stages, links
        self.pipeline, self.rank = state.key
        self.recorder, self.decisions = state.recorder, state.decisions
        self.mailbox = Mailbox(self.rank, lowered, links.transport, self.recorder)
        self.joints, self.lending = Joints(lowered.schedule, self.mailbox), Lending(self.mailbox, self.recorder)
        provisional = RULES[lowered.schedule.rule].provisional
        self.combining: Meetings | None = None
        if links.common is not None:
            party = Party(combine, self.pipeline, holders, links.common, self.decisions, self.recorder)
            if links.averages is not None:
                self.combining = Combining(party, links.averages)
            elif links.waves is not None:
                self.combining = WaveCombining(party, links.waves)
            holders = {index: tuple(h for h in all_ if h.pipeline == self.pipeline) for index, all_ in holders.items()}
        tying = Tying(self.pipeline, holders, links.ties, sum(bool(stage.ties) for stage in self.stages.values()))
        self.updates = Updates(
            self.pipeline, holders, links.reducer, tying, links.council, self.decisions, self.recorder, provisional
        )
        self.m, self._held, self._slicing = lowered.schedule.microbatches, state.snapshots, state.slicing
        forwards = sum(i.action.op is Op.F for i in lowered.programs[self.rank].period)
        steps = sum(spec.share > 0 for spec in specs.values())
        decides = any(spec.decides for spec in specs.values())
        waits = decides and not provisional
        self.reporting = Reporting(forwards, steps, decides, waits, self.decisions, self.recorder)
        self._account = Account(self.recorder, self.stages.values())
        self._books: dict[Stage, StageState] = {}
        self._begun: dict[Stage, int] = {}  # the batch that each stage is at
        self._drafts: dict[tuple[Stage, Piece], Draft] = {}
        self._start = 0
        self._more = True
        self._rejected = False  # the version that the last VALIDATE has decided on
        self._at_border: Callable[[int], Iterator[Wait]] | None = None
        self._keeping = self._keep(None)

    def close(self) -> None:
        """Stop whatever runs in the background."""
        self.links.close()

    def run(
        self,
        source: BatchSource,
        start: int,
        older: int,
        at_border: Callable[[int], Iterator[Wait]] | None = None,
        saving: Saving | None = None,
    ) -> Iterator[Wait | Report]:
        """Run one span of at least one batch, from an empty pipeline to an empty pipeline.

        Args:
            source: the data; where data enters it is asked whether batches follow.
            start: number of the span's first batch since the start of training.
            older: 0, or -1 where batch 0 of the span reads the version before the newest.
            at_border: what to do before the first forward of a batch, given its number since the start of training.
            saving: snapshots to take on the way.
        """
        self._start, self._at_border = start, at_border
        self._keeping = self._keep(saving)
        self._begun.clear()
        self._drafts.clear()
        self._books = {stage: StageState(replace(spec, older=older)) for stage, spec in self.specs.items()}
        program, t = self.lowered.programs[self.rank], 0
        for instruction in program.period:
            if instruction.ahead:  # what the period before the first one would have posted
                yield from self._instruct(instruction, -1, source)
        while True:
            self._rejected = False
            for place, instruction in enumerate(program.rejected or program.period):
                if place >= len(program.period) and not self._rejected:
                    break
                if not self._rejected:
                    instruction = program.period[place]
                if not instruction.ahead or self._more:  # the first forward of the batch tells whether more follow
                    yield from self._instruct(instruction, t, source)
            t += 1
            if not self._more:
                break
        for books in self._books.values():
            books.drain(t)
        for instruction in program.epilogue:
            yield from self._instruct(instruction, t, source)
        for stage, spec in self.specs.items():
            if not spec.share:
                self._keeping.untrained(self.stages[stage], self._start + t)
        yield from self.reporting.pending()
        if self.combining is not None:
            trained = [self.stages[stage] for stage, spec in self.specs.items() if spec.share]
            ends = yield from self.combining.drain(trained, self._start + t, self._hold_bytes)
            source.stopped |= ends  # which others may have set meanwhile
        yield from self.mailbox.flush()

    def _keep(self, saving: Saving | None) -> Keeping:
        return Keeping(saving, self._start, self.decisions, self.recorder, self._held)

    def _instruct(self, instruction: Instruction, t: int, source: BatchSource) -> Iterator[Wait | Report]:
        given, route, needs, _ = instruction
        action = existing(given, t, self.m)
        if self.combining is not None and given.op is Op.AVERAGE:
            action = self.combining.existing(given, t, self.m, self._start)
        if action is None:
            return
        first = self._first(action, t)
        if action.op is Op.SEND:
            yield from self.mailbox.send(Message(route, first))
            return
        yield from self.reporting.pending()
        if action.op is Op.RECV:
            self.mailbox.receive(Message(route, first))
            return
        if action.op is Op.F:
            yield from self._begin(action.stage, self._start + first // self.m)
        for message in needs:
            wanted = Message(message.route, message.first + t * self.m)
            what = f"{self._name(action.stage)}, {action.op}{first}"
            yield from self.mailbox.collect(wanted, self._start + wanted.first // self.m, what)
        if action.op in (Op.STEP, Op.VALIDATE):
            yield from self.updates.wait(action.stage, self._start + first, action.op, f"{action.op}{first}")
        if action.op is Op.AVERAGE and self.combining is not None:
            stage, label = self.stages[action.stage], f"{action.op}{first}"
            yield from self.combining.meet(stage, self._start + first, label, self._hold_bytes)
        self._act(action, t, source)

    def _first(self, action: Action, t: int) -> int:
        """The first microbatch (or the batch) of an action, counted through the span."""
        return action.unit.first + t * (1 if action.unit.kind is Kind.BATCH else self.m)

    def _begin(self, stage: Stage, batch: int) -> Iterator[Wait]:
        """What comes before the first forward of a batch on a stage, and on the rank."""
        if self._begun.get(stage, -1) >= batch:
            return
        first = batch > max(self._begun.values(), default=-1)
        self._begun[stage] = batch
        if self.specs[stage].share:
            self._keeping.before_forward(self.stages[stage], batch)
        else:
            self._keeping.untrained(self.stages[stage], batch)
        if first and self._at_border is not None:
            yield from self._at_border(batch)

    # --- actions ----------------------------------------------------------------------------------------------------

    def _act(self, action: Action, t: int, source: BatchSource) -> None:
        """Run one action that is not a message, in the books and in fact."""
        stage, books, first = self.stages[action.stage], self._books[action.stage], self._first(action, t)
        whole = action.unit.kind is Kind.BATCH
        label = f"{action.op}{first if whole else format_unit(action.unit._replace(first=first))}"
        start, self.recorder.doing = self.recorder.now(), f"{self._name(action.stage)}, {label}"
        batch = self._start + (first if whole else first // self.m)
        try:
            if action.op is Op.VALIDATE:
                self._rejected = books.rejecting = self.updates.rejects(action.stage, batch)
            # What the first stage has read, which is on another rank: the schedule says it, and has been proven.
            reads = action.reads and {first: max(action.reads.versions[0] + t, books.spec.older)}
            books.apply(action, t, reads or {})
            if action.op is Op.F:
                sample, more = self._read(stage, first, source)
                start = self.recorder.now()
                self._forward(stage, action, t, sample, more)
            elif whole:
                self._manage(stage, action.op, batch, source)
            else:
                self._pass(stage, action, t)
        except Exception as error:
            error.add_note(f"raised by {label} of {stage.module.where}")
            raise
        if stage.store is not None and books.spec.share:
            stage.store.retain(v + self._start for v in books.versions)
            stage.store.retain_copies(books.copies)
        self._keeping.record()
        self._account.after(stage, action.op)
        if action.unit.kind is Kind.EVAL:
            batch = -1  # evaluation is no batch of the training
        version = batch + 1 if action.op in (Op.STEP, Op.VALIDATE, Op.AVERAGE) else self._version(action, t, books)
        index, pipeline, _ = action.stage
        end, rank, what = self.recorder.now(), self.recorder.rank, action.op.value
        place = (index, pipeline, batch, version, "", -1 if whole else first)
        self.recorder.add(Interval(rank, "compute", start, end, what, label, *place, self.recorder.span))

    def _pass(self, stage: StageRuntime, action: Action, t: int) -> None:
        """Whatever works on microbatches, but for forwards."""
        first = self._first(action, t)
        keys = [(k, action.unit.slice[0] if action.unit.slice else 0) for k in range(first, first + action.unit.count)]
        key = keys[0]
        version = self._version(action, t, self._books[action.stage])
        match action.op:
            case Op.B | Op.I:
                run = stage.backward if action.op is Op.B else stage.backward_for_inputs
                for each in keys:  # one after the other, so that gradients are added in the order of the microbatches
                    self._backward(stage, each, partial(run, version=version, copy=self._copy(action, t)))
            case Op.W:
                stage.backward_for_weights(key, self._start + first // self.m, version, self._copy(action, t))
            case Op.PREDICT:
                copy = self._copy(action, t)
                assert copy is not None
                versions = self._versions(action, t, self._books[action.stage])
                stage.predict(copy, versions, self._start + copy.first // self.m, self.decisions.scaler.scale)
            case Op.R:
                for each in keys:
                    again = stage.recompute(each, version, self.joints.input_again(stage.key, each))
                    header = Header(self._start + first // self.m, each[0], self._more, piece=each[1])
                    self.joints.hand_on_again(stage.key, header, again)
            case Op.REDO:
                self._redo(stage, action, t)
            case Op.OFFLOAD | Op.FETCH | Op.HOLD | Op.RETURN if action.peer is not None:
                header = Header(self._start + first // self.m, first, self._more, piece=key[1])
                self.lending.move(stage, action.op, action.peer, header)
            case Op.OFFLOAD | Op.FETCH:
                nbytes = stage.graphs.park(stage.flights[key].work, away=action.op is Op.OFFLOAD)
                self.recorder.change("parked activations", nbytes if action.op is Op.OFFLOAD else -nbytes)
            case _:
                raise AssertionError(f"the runtime does not offer {action.op}")

    def _manage(self, stage: StageRuntime, op: Op, batch: int, source: BatchSource) -> None:
        """Whatever works on a whole batch, counted from the start of training."""
        match op:
            case Op.REDUCE:
                self.updates.reduce(stage, batch)
            case Op.TIE:
                self.updates.tie(stage, batch)
            case Op.DECIDE:
                loss = self.reporting.sum(batch) if self._is_last(stage) else None
                self.updates.hand_in(stage, batch, loss)
                if self.combining is not None:
                    self.combining.hand_in(stage.key, batch, loss is not None)
            case Op.STEP if self.updates.provisional:
                self.updates.try_step(stage, batch, self.reporting.weight_for_update(batch))
            case Op.STEP:
                weight = self.reporting.weight_for_update(batch)
                decision = self.updates.step(stage, batch, weight, self._books[stage.key].rotated)
                source.stopped |= decision.stop
                meets = self.combining is not None and self.combining.combine.meets(batch)
                (self._keeping.before_meeting if meets else self._keeping.after_step)(stage, batch + 1)
            case Op.AVERAGE if self.combining is not None:
                source.stopped |= self.combining.end(stage, batch)
                self._keeping.after_step(stage, batch + 1)
            case Op.VALIDATE:
                source.stopped |= self.updates.validate(stage, batch).stop
                if not self._rejected:
                    self._drafts.clear()
            case _:
                raise AssertionError(f"the runtime does not offer {op}")

    def _is_last(self, stage: StageRuntime) -> bool:
        """Whether reports are of its loss."""
        return stage.key.index == self.lowered.schedule.num_stages - 1

    def _name(self, stage: Stage) -> str:
        """Rank (counted through all pipelines) and stage, for messages."""
        return f"rank {self.recorder.rank}, stage {stage.name}"

    def _version(self, action: Action, t: int, books: StageState) -> int:
        """The version an action reads, counted from the start of training; -1 where the schedule names none."""
        return -1 if action.reads is None else self._versions(action, t, books)[0]

    def _versions(self, action: Action, t: int, books: StageState) -> tuple[int, ...]:
        """All versions that an action reads."""
        assert action.reads is not None
        return tuple(self._start + max(version + t, books.spec.older) for version in action.reads.versions)

    def _copy(self, action: Action, t: int) -> Copy | None:
        """The derived copy that an action reads or bears."""
        derive = None if action.reads is None else action.reads.derive
        return None if derive is None else Copy(derive.label, derive.first + t * self.m)

    def _read(self, stage: StageRuntime, k: int, source: BatchSource) -> tuple[Sample, bool]:
        """Take a microbatch where data enters, and whether another batch follows; that is no work."""
        enters = self.joints.enters(stage.key)
        if not enters and not stage.has_loss:
            return NO_SAMPLE, False
        start = self.recorder.now()
        sample, more = source.sample(self.pipeline, k), enters and source.follows(k // self.m + 1)
        rank, end, label = self.recorder.rank, self.recorder.now(), f"read sample {k}"
        self.recorder.add(Interval(rank, "compute", start, end, Waiting.DATA, label, stage.key.index, cause="the data"))
        return sample, more

    def _forward(self, stage: StageRuntime, action: Action, t: int, sample: Sample, more: bool) -> None:
        k, piece = self._first(action, t), action.unit.slice
        batch, number = self._start + k // self.m, piece[0] if piece else 0
        if piece is not None:
            own, target = (self._slicing.part(tree, piece) for tree in (sample.input, sample.target))
            sample = Sample(own, target, sample.checksum)
        if self.joints.enters(stage.key):
            value, wants = cast(self.joints.own_input(stage.key, sample.input), stage.module.precision), NO_GRADIENTS
            header = Header(batch, k, more, sample.checksum, piece=number)
        else:
            header, value, wants = self.joints.inputs(stage.key, (k, number))
            if stage.has_loss and header.checksum != sample.checksum:
                raise DataError(
                    f"microbatch {k} (batch {batch}) is not the same on the first and the last stage; every rank must "
                    "see the same samples in the same order"
                )
        if batch >= max(self._begun.values()):  # an earlier batch may still go through later chunks
            self._more = header.more
        if self._books[stage.key].provisional:
            stage.graphs.draft()
            self._drafts[stage.key, (k, number)] = Draft(header, value, wants, sample.target)
        if action.unit.kind is Kind.EVAL:
            output, loss = stage.evaluate(Microbatch(k, Draw(-1, k), sample.target), value)
        elif not self.specs[stage.key].share:
            draw = Draw(batch, self.pipeline * self.m + k % self.m, number)
            output, loss = stage.pass_on(Microbatch(k, draw, sample.target), value)
        else:
            output, loss = self._train(stage, action, t, value, wants, sample.target)
        if loss is not None and self._is_last(stage):
            self.reporting.add(batch, (k, number), loss)
        if stage.module.hands_on:
            self.joints.hand_on(stage.key, header, output, Payload.ACTIVATION)
        self.reporting.forward_done(batch, action.unit.kind is Kind.EVAL)

    def _train(
        self, stage: StageRuntime, action: Action, t: int, value: Any, wants: tuple[bool, ...], target: Any
    ) -> tuple[Any, Loss | None]:
        """A forward that a backward follows."""
        k, piece = self._first(action, t), action.unit.slice
        batch = self._start + k // self.m
        scale = self.decisions.scale(batch) if stage.has_loss else 1.0
        draw = Draw(batch, self.pipeline * self.m + k % self.m, piece[0] if piece else 0)
        microbatch = Microbatch(k, draw, target, scale, piece)
        version = self._version(action, t, self._books[action.stage])
        return stage.forward(microbatch, value, wants, version, self._copy(action, t))

    def _redo(self, stage: StageRuntime, action: Action, t: int) -> None:
        """A forward again, on the version that is decided on now, and on what forwards before it have made again."""
        key = self._first(action, t), 0
        header, value, wants, target = self._drafts.pop((stage.key, key))
        value = self.joints.repaired(stage.key, key, value)
        output, loss = self._train(stage, action, t, value, wants, target)
        if loss is not None and self._is_last(stage):
            self.reporting.add(header.batch, key, loss)
        if stage.module.hands_on:
            self.joints.hand_on(stage.key, header, output, Payload.REPAIR)

    def _backward(self, stage: StageRuntime, key: Piece, run: Callable[..., Gradients]) -> None:
        batch = self._start + key[0] // self.m
        weight, gradients = self.joints.gradients(stage.key, key)
        self.reporting.hear(batch, weight)
        found = run(key, batch, gradients=gradients)
        # The weight of a batch is known to the last stage before its last backward, so it rides on gradients.
        header = Header(batch, key[0], self._more, weight=self.reporting.weight(batch), piece=key[1])
        self.joints.hand_back(stage.key, header, found)

    def _hold_bytes(self) -> None:
        """Take down what the parameter-sized memory of this rank is used for, while pipelines meet."""
        self._keeping.record()
        self._account.take_down(optimizers=True)
