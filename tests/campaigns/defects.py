"""The defects of `make planted`: what is changed where, and which test files are expected to notice.

A place is a folder below src/penstock and a text that stands there exactly once, in whatever file: so a defect stays
valid when modules are renamed or taken apart. `tests/test_planted_defects.py` holds every place to exist.
"""

from __future__ import annotations

from typing import NamedTuple


class Defect(NamedTuple):
    """A small mistake, as people make them.

    Attributes:
        what: the mistake in words.
        folder: below src/penstock.
        old: text that stands once in the folder.
        new: what stands there instead.
        tests: files that are expected to notice, those that are fastest first.
    """

    what: str
    folder: str
    old: str
    new: str
    tests: tuple[str, ...]


DEFECTS = (
    # --- plans -------------------------------------------------------------------------------------------------------
    Defect(
        "the first stage of a pipeline on servers sums its gradients as slowly as the others",
        "plan/planners",
        "below = self._devices.levels[at - 1].units if at and first else 1",
        "below = 1",
        ("tests/plan/test_planners_against_brute_force.py",),
    ),
    Defect(
        "microbatches in flight are rounded down",
        "plan/stages",
        "in_flight = -(-ahead // stage.replicas)",
        "in_flight = max(ahead // stage.replicas, 1)",
        ("tests/plan/test_planners_against_brute_force.py",),
    ),
    Defect(
        "an edge to a later stage is counted where it arrives only",
        "plan/planners",
        "came + goes[None]",
        "came + 0 * goes[None]",
        ("tests/plan/test_planners_against_brute_force.py",),
    ),
    Defect(
        "a knapsack keeps dominated points and cuts the others",
        "plan/stages",
        "best[1:] < best[:-1]",
        "best[1:] > best[:-1]",
        ("tests/plan/test_knapsack.py", "tests/plan/test_planners_against_brute_force.py"),
    ),
    Defect(
        "a branch is cut from the layer that joins it",
        "plan/stages",
        "larger = prefix | closure[number]",
        "larger = prefix | 1 << number",
        ("tests/plan/test_planners_against_brute_force.py", "tests/plan/test_published_profiles.py"),
    ),
    Defect(
        "a plan's batch is one of a short run, with fill and drain",
        "plan/planners",
        "_SPANS = (3, 5)",
        "_SPANS = (0, 2)",
        ("tests/plan/test_simulated.py",),
    ),
    # --- the command line ---------------------------------------------------------------------------------------------
    Defect(
        "options of the command line go behind --set",
        "cli",
        'return [*(changes or ()), *(f"{key}={value}" for key, value in keys.items() if value is not None)]',
        'return [*(f"{key}={value}" for key, value in keys.items() if value is not None), *(changes or ())]',
        ("tests/cli/test_commands.py",),
    ),
    Defect(
        "every worker of torchrun prints what all of them have to say",
        "launch",
        "def is_first_to_say(message: str) -> bool:",
        "def is_first_to_say(message: str) -> bool:\n    return True\n\n\ndef unused(message: str) -> bool:",
        ("tests/launch/test_torchrun.py",),
    ),
    # --- schedule and simulator: sharded state ------------------------------------------------------------------------
    Defect(
        "a gradient has room as soon as another one is complete, not when its sum has ended",
        "schedule/machine",
        "ready = max(ready, room.take(begun)) if begun else ready",
        "room.take(begun) if begun else ready",
        ("tests/simulate/test_gradient_room.py",),
    ),
    Defect(
        "a sum frees the room of a gradient twice",
        "schedule/machine",
        "self.freed.append((gradient, None))",
        "self.freed.extend([(gradient, None)] * 2)",
        ("tests/simulate/test_gradient_room.py",),
    ),
    Defect(
        "the proof of progress leaves out backwards that wait for room alone",
        "schedule/machine",
        "_interacts(i) or (limited and _adds(i))",
        "_interacts(i)",
        ("tests/simulate/test_gradient_room.py",),
    ),
    Defect(
        "the compiled simulator takes the room that was freed last",
        "simulate/compiled",
        "message = self._freed.popleft()",
        "message = self._freed.pop()",
        ("tests/simulate/test_compiled.py",),
    ),
    Defect(
        "the compiled simulator lets gathers and sums of a rank run side by side",
        "simulate/compiled",
        "lane = self._rules.lane_key(op, group)",
        "lane = op, tuple(sorted({member.rank for member in group}))",
        ("tests/simulate/test_compiled.py",),
    ),
    Defect(
        "the compiled simulator waits for a gather of any version of a stage",
        "simulate/compiled",
        "if kind == VERSION and key in self._gathered:",
        "key = max((k for k in self._gathered if k[0] == stage), default=key)\n            "
        "if kind == VERSION and key in self._gathered:",
        ("tests/simulate/test_compiled.py",),
    ),
    Defect(
        "a version is gathered before the update that makes it",
        "schedule/transforms",
        "begins = max(batch, stay.stage.version) * length - 1",
        "begins = (batch - 2) * length - 1",
        ("tests/schedule/test_sharding.py",),
    ),
    Defect(
        "what the epilogue reads is not gathered for it",
        "schedule/transforms",
        "return (*begun, *(each for actions in after for each in actions))",
        "return tuple(each for actions in after for each in actions)",
        ("tests/schedule/test_sharding.py",),
    ),
    Defect(
        "endless breadth-first puts off as many backwards on every rank",
        "schedule/orders",
        "behind = -(-most * (stages - 1 - rank) // max(stages - 1, 1))",
        "behind = most",
        ("tests/schedule/test_sharding.py",),
    ),
    Defect(
        "a method's own sharding goes before the one that is asked for",
        "schedule/methods",
        "read_sharding(method.sharding if given is None else given)",
        'read_sharding(method.sharding if method.sharding != "none" or given is None else given)',
        ("tests/schedule/test_sharding.py",),
    ),
    Defect(
        "time on the network counts as hidden while a rank stands idle",
        "simulate",
        "total += max(min(end, interval.end) - max(start, interval.start), 0.0)",
        "total += max(interval.end - max(start, interval.start), 0.0)",
        ("tests/simulate/test_sharded_network.py", "tests/docs/test_sharded_state_page.py"),
    ),
    # --- what users hand over and get back ----------------------------------------------------------------------------
    Defect(
        "a model in several processes hands out weights from before the run",
        "runtime/execute",
        "if begins and trains and self._held is not None:",
        "if begins and not trains and self._held is not None:",
        ("tests/stage/test_held_elsewhere.py",),
    ),
    Defect(
        "a shared parameter comes back under one of its names",
        "runtime",
        "names.setdefault(id(tensor), []).append(name)",
        "names[id(tensor)] = [name]",
        ("tests/runtime/test_model_weights.py",),
    ),
    Defect(
        "ranks of parallel pipelines read one batch ahead too few",
        "schedule/proof",
        "return max(found) if all(found) else 0",
        "return max(found) - 1 if all(found) else 0",
        ("tests/runtime/test_later_rank_fails.py",),
    ),
    # --- schedule: orders, rules, the proof, the machine --------------------------------------------------------------
    Defect(
        "1F1B warms up with one forward too many",
        "schedule/orders",
        "return [number - 1 for number in in_flight_on(",
        "return [number for number in in_flight_on(",
        ("tests/schedule/test_published_orders.py",),
    ),
    Defect(
        "interleaved 1F1B forgets that a rank waits for the way there and back",
        "schedule/orders",
        "more = 2 * (stages - 1) if in_flight is None",
        "more = stages - 1 if in_flight is None",
        ("tests/schedule/test_published_orders.py", "tests/schedule/test_orders_of_the_literature.py"),
    ),
    Defect(
        "an update may start from another version than the newest",
        "schedule/proof",
        "if self.newest != batch or batch in self.provisional:",
        "if batch in self.provisional:",
        ("tests/schedule/test_planted_faults.py", "tests/schedule/test_golden_faults.py"),
    ),
    Defect(
        "a pass may read a version that is gone",
        "schedule/proof",
        "            if version not in self.versions:",
        "            if version > self.newest:",
        ("tests/schedule/test_golden_faults.py", "tests/schedule/test_planted_faults.py"),
    ),
    Defect(
        "the delay of backwards is taken from what forwards read",
        "schedule/proof",
        "gradient.backward += versions[0]",
        "gradient.backward += flight.versions[0]",
        ("tests/schedule/test_delay_profiles.py", "tests/schedule/test_proof_facts.py"),
    ),
    Defect(
        "an update in place may overwrite what a microbatch in flight still reads",
        "schedule/proof",
        "if rule.update is Update.IN_PLACE and reader is not None:",
        "if rule.update is Update.ROTATE and reader is not None:",
        ("tests/schedule/test_golden_faults.py", "tests/schedule/test_planted_faults.py"),
    ),
    Defect(
        "an average may change weights that a pass has read already",
        "schedule/proof",
        "if self.newest_read or batch >= self.newest:",
        "if batch >= self.newest:",
        ("tests/schedule/test_average_actions.py",),
    ),
    Defect(
        "an evaluation between two batches may wait for what is sent after it",
        "schedule/machine",
        "if not lag and position < borders[rank] and not early:",
        "if not lag and position < borders[rank] and early and not position:",
        ("tests/schedule/test_batch_border.py",),
    ),
    Defect(
        "on the machine nobody waits for what a HOLD or FETCH takes",
        "schedule/machine",
        "needs += awaits",
        "needs += ()",
        ("tests/schedule/test_awaited.py",),
    ),
    Defect(
        "a RECV of parked activations does not wait for a buffer",
        "comm/p2p",
        "return self._wait_for_room() if len(self._open) >= self._window else None",
        "return self._wait_for_room() if not self._open and not self._window else None",
        ("tests/stage/test_activation_offload.py",),
    ),
    # --- simulate, timeline, idle time --------------------------------------------------------------------------------
    Defect(
        "a bubble is divided by the longest span of a rank instead of by the makespan",
        ".",
        "total = len(self.busy) * self.makespan\n",
        "total = len(self.busy) * self.rank_span\n",
        ("tests/test_timeline.py",),
    ),
    Defect(
        "messages of the batch before are counted in the first batch of a span",
        "simulate",
        "times = max(batches - max(begun, 0), 0) if part == 0",
        "times = batches if part == 0",
        ("tests/simulate/test_closed_forms.py", "tests/simulate/test_published_figures.py"),
    ),
    Defect(
        "a full backward costs what its first half does",
        "simulate",
        "return (cost.backward_input + cost.backward_weight) * amount",
        "return (cost.backward_input + cost.backward_input) * amount",
        ("tests/simulate/test_stage_costs.py", "tests/simulate/test_against_oracles.py"),
    ),
    Defect(
        "a simulated update is labelled with the version before it",
        "simulate",
        "version = batch + 1 if op is Op.STEP else",
        "version = batch if op is Op.STEP else",
        (
            "tests/view/test_perfetto.py",
            "tests/simulate/test_2bw_figure.py",
            "tests/simulate/test_collectives_in_time.py",
        ),
    ),
    Defect(
        "waiting for a message that is not made yet counts as communication",
        ".",
        "(wait == Waiting.MESSAGE and time >= self.made)",
        "(wait == Waiting.MESSAGE and time <= self.made)",
        ("tests/test_idle_time.py",),
    ),
    # --- weights: versions, decisions, corrections, averages ----------------------------------------------------------
    Defect(
        "averaged weights go the larger part of the way",
        "weights/memory",
        "flat.lerp_(other._flats[dtype], share)",
        "flat.lerp_(other._flats[dtype], 1.0 - share)",
        ("tests/runtime/test_snapshots.py", "tests/runtime/test_combinations.py"),
    ),
    Defect(
        "a gradient in low precision is not multiplied by its factor",
        "weights",
        "updater.in_place(self._master, gradient, factor, stepped)",
        "updater.in_place(self._master, gradient, 1.0, stepped)",
        ("tests/weights/test_precision.py",),
    ),
    Defect(
        "a parameter that no backward reaches keeps the gradient of an earlier batch",
        "weights/memory",
        "                self.views[key].zero_()\n",
        "                self.views[key].add_(0.0)\n",
        ("tests/stage/test_kinds_of_stages.py", "tests/weights/test_version_safety.py"),
    ),
    Defect(
        "gradients are scaled up to the clipping norm, too",
        "weights",
        "factor *= min(1.0, clip / (norm + _EPSILON))",
        "factor *= clip / (norm + _EPSILON)",
        ("tests/runtime/test_decisions.py",),
    ),
    Defect(
        "the loss scale grows one batch late",
        "weights",
        "if self.finite_in_a_row == spec.interval:",
        "if self.finite_in_a_row > spec.interval:",
        ("tests/runtime/test_decisions.py",),
    ),
    Defect(
        "an overflow under a scale that has been lowered since lowers it again",
        "weights",
        "            if decision.scale <= self.scale:\n",
        "            if decision.scale:\n",
        ("tests/runtime/test_decisions.py",),
    ),
    Defect(
        "PipeMare's decay does not depend on the delay as it should",
        "weights/corrections",
        "wanted.decay ** (1.0 / float(place.delay))",
        "wanted.decay ** float(place.delay)",
        ("tests/weights/test_pipemare_slots.py", "tests/weights/test_corrections.py"),
    ),
    Defect(
        "error feedback acts on the first update",
        "weights/corrections",
        "if step.update > self.began:",
        "if step.update >= self.began:",
        ("tests/weights/test_corrections_long_delays.py", "tests/weights/test_corrections.py"),
    ),
    Defect(
        "SpecTrain predicts one microbatch too far",
        "weights/corrections",
        '"spectrain": ((k // 2 + n - k - 1) / m, (k // 2) / m),',
        '"spectrain": ((k // 2 + n - k) / m, (k // 2) / m),',
        ("tests/weights/test_corrections_long_delays.py", "tests/weights/test_corrections.py"),
    ),
    Defect(
        "block momentum ignores its step size",
        "weights",
        "d.mul_(self._eta).add_(gained, alpha=self.combine.step)",
        "d.mul_(self._eta).add_(gained)",
        ("tests/runtime/test_averaging.py",),
    ),
    Defect(
        "a version that is given back keeps the claims on its old content valid",
        "weights",
        "            buffer.gradient = None\n            buffer.rewrite()\n",
        "            buffer.gradient = None\n",
        ("tests/weights/test_version_safety.py",),
    ),
    # --- comm: sums, messages -----------------------------------------------------------------------------------------
    Defect(
        "pipelines of one process add their gradients in another order",
        "comm/collective",
        "            for other in others:\n                total.add_(other)\n",
        "            for other in reversed(others):\n                total.add_(other)\n",
        ("tests/comm/test_width.py",),
    ),
    Defect(
        "pipelines of several processes add their gradients in another order",
        "comm/collective",
        "for share in shares[1:]:",
        "for share in reversed(shares[1:]):",
        ("tests/comm/test_fast_reduction.py", "tests/comm/test_width.py"),
    ),
    Defect(
        "what is handed over in a process is not copied",
        "comm/p2p",
        "message.tree = _copied(message.tree)",
        "message.tree = message.tree",
        ("tests/comm/test_messages_between_stages.py", "tests/stage/test_block_side_effects.py"),
    ),
    Defect(
        "shares of a decision lose what the rounding of squares has lost",
        "weights",
        "math.fsum(part for share in shares for part in (share.squares, share.rest)),",
        "math.fsum(share.squares for share in shares),",
        ("tests/runtime/test_decisions.py",),
    ),
    # --- stage: passes of one stage -----------------------------------------------------------------------------------
    Defect(
        "the norm counts a shared parameter on every stage that holds it",
        "runtime",
        "if tie.stages[0] != stage.index}",
        "if tie.stages[0] not in tie.stages}",
        ("tests/partition/test_tied.py",),
    ),
    Defect(
        "a rejected update leaves forwards that have read it",
        "stage",
        "if flight.version == batch + 1]",
        "if flight.version == batch]",
        ("tests/runtime/test_post_validation.py",),
    ),
    Defect(
        "random numbers are the same in every batch",
        "stage",
        "{block}/{key.batch}/{key.microbatch}",
        "{block}/0/{key.microbatch}",
        ("tests/stage/test_rng.py",),
    ),
    Defect(
        "buffers that a forward changes are not kept for its second run",
        "stage",
        "place: tensor.clone() for place, tensor in places.items() if place in restless",
        "place: tensor for place, tensor in places.items() if place in restless",
        ("tests/stage/test_recompute.py", "tests/stage/test_rng.py"),
    ),
    Defect(
        "a skipped update moves the averaged weights",
        "stage",
        "        if not factor:\n            return\n        if self.average is not None and",
        "        if self.average is not None and",
        ("tests/runtime/test_evaluation.py", "tests/runtime/test_combinations.py"),
    ),
    # --- runtime: updates, ranks, a run -------------------------------------------------------------------------------
    Defect(
        "parallel pipelines draw the same random numbers",
        "runtime",
        "return RngKey(turn.batch, self._span.pipeline * self._m + turn.first % self._m, self._number)",
        "return RngKey(turn.batch, turn.first % self._m, self._number)",
        ("tests/comm/test_width.py",),
    ),
    Defect(
        "every pipeline hands in the norm of the gradient that all have",
        "runtime",
        "squares = stage.weights.gradient_squares(batch) if counts else (0.0, 0.0)",
        "squares = stage.weights.gradient_squares(batch)",
        ("tests/comm/test_width.py",),
    ),
    Defect(
        "pipelines meet by the batches of a span, not by those of training",
        "runtime",
        "self._span.meetings.meets(self._span.start + t + self._offset)",
        "self._span.meetings.meets(t + self._offset)",
        ("tests/runtime/test_averaging.py",),
    ),
    Defect(
        "samples that differ between the first and the last stage are not noticed",
        "runtime",
        "if self._has_loss and header.checksum != sample.checksum:",
        "if self._has_loss and header.checksum is None:",
        ("tests/runtime/test_failures.py",),
    ),
    Defect(
        "a divergence is judged one batch late",
        "runtime",
        "len(self._losses) < divergence.window:",
        "len(self._losses) <= divergence.window:",
        ("tests/train/test_phase_plan.py", "tests/runtime/test_decisions.py", "tests/train/test_phase_switcher.py"),
    ),
    Defect(
        "a backward does not wait for the activations that a FETCH takes back",
        "runtime",
        "messages = (*instruction.needs, *instruction.awaits)",
        "messages = instruction.needs",
        ("tests/stage/test_activation_offload.py",),
    ),
    # --- checkpoint ---------------------------------------------------------------------------------------------------
    Defect(
        "one checkpoint more than wanted stays",
        "checkpoint",
        "if path.name <= newest.name][:-keep]:",
        "if path.name <= newest.name][: -keep - 1]:",
        ("tests/checkpoint/test_format.py",),
    ),
    Defect(
        "a file with other content of the same length passes",
        "checkpoint",
        '    if found != {"bytes": written["bytes"], "sha256": written["sha256"]}:\n',
        '    if found["bytes"] != written["bytes"]:\n',
        ("tests/checkpoint/test_format.py",),
    ),
    Defect(
        "the limit of a restart excludes the checkpoint at the limit",
        "checkpoint",
        "if limit is None or batch <= limit]",
        "if limit is None or batch < limit]",
        ("tests/checkpoint/test_format.py", "tests/checkpoint/test_manager.py", "tests/train/test_phase_switcher.py"),
    ),
    # --- train --------------------------------------------------------------------------------------------------------
    Defect(
        "the warm-up begins at a rate of zero",
        "train",
        "return (update + 1) / warm_up",
        "return update / warm_up",
        ("tests/train/test_lr_schedule.py",),
    ),
    Defect(
        "every epoch has the same order of samples",
        "train",
        "for part in (seed ^ (seed >> 32) * 0x9E3779B1, epoch, round_, value):",
        "for part in (seed ^ (seed >> 32) * 0x9E3779B1, round_, value):",
        ("tests/train/test_windows.py",),
    ),
    Defect(
        "targets are the inputs",
        "train",
        "tokens_BL[:, 1:].contiguous()",
        "tokens_BL[:, :-1].contiguous()",
        ("tests/train/test_windows.py",),
    ),
    Defect(
        "patience lasts one evaluation longer",
        "train",
        "self._worse >= self._limit:",
        "self._worse > self._limit:",
        ("tests/runtime/test_early_stop_notice.py", "tests/train/test_interrupted.py"),
    ),
    Defect(
        "a run on an order of one's own keeps the name of its file instead of the schedule",
        "train",
        'return f"# {path}{said}{ruled}\\n{str(proof.schedule).strip()}\\n"',
        'return f"{path}{said}{ruled}"',
        ("tests/train/test_own_schedules.py",),
    ),
    Defect(
        "a method that is given to a run on an order of one's own is trained beside it",
        "train",
        "            values |= {other: None, ",
        "            values |= {",
        ("tests/train/test_own_schedules.py",),
    ),
    # --- verify -------------------------------------------------------------------------------------------------------
    Defect(
        "a number equals NaN",
        "verify",
        "(a.isnan() & b.isnan())",
        "(a.isnan() | b.isnan())",
        ("tests/verify/test_verify.py",),
    ),
    Defect(
        "numbers that a pipeline does not show do not differ",
        "verify",
        "missing = sorted(self._missing) if complete else []",
        "missing = []",
        ("tests/verify/test_verify.py",),
    ),
    Defect(
        "an order of one's own is verified by the equations of a flush, whatever its rule",
        "verify",
        '"double-buffer": "2bw",',
        '"double-buffer": "1f1b",',
        ("tests/verify/test_own_orders.py",),
    ),
    Defect(
        "the reference divides a batch by the loss scale twice",
        "verify/reference",
        "mean = c / (weight * scale)",
        "mean = c / (weight * scale * scale)",
        ("tests/verify/test_reference_synchronous.py", "tests/runtime/test_decisions.py"),
    ),
    # --- sharded state ------------------------------------------------------------------------------------------------
    Defect(
        "the last row of every shard has no owner",
        "weights/memory",
        "min((place + 1) * size, count), count)",
        "min((place + 1) * size, count) - (place > 0), count)",
        ("tests/runtime/test_sharded_faults.py",),
    ),
    Defect(
        "with sharded sums only the first pipeline counts in the norm",
        "runtime/update",
        "counts |= self.gathers is not None and self.gathers.splits_gradients",
        "counts |= False",
        ("tests/runtime/test_sharded_state.py",),
    ),
    Defect(
        "the norm counts whole gradients, of which only a shard is summed",
        "weights",
        "return self.shards.own(views) if self._level.splits_gradients else views",
        "return views",
        ("tests/runtime/test_sharded_state.py",),
    ),
    Defect(
        "a sum of shards begins with the own one",
        "comm/collective",
        "total = tensors[0] if owner == 0 else tensors[0].clone()\n    for tensor in tensors[1:]:",
        "total = tensors[owner].clone()\n    for tensor in (*tensors[:owner], *tensors[owner + 1 :]):",
        ("tests/runtime/test_sharded_state.py",),
    ),
    Defect(
        "between processes a sum of shards ends with the first one",
        "comm/collective",
        "total = shares.pop(0)\n            for share in shares.values():",
        "total = shares.pop(max(shares))\n            for share in shares.values():",
        ("tests/runtime/test_sharded_state.py",),
    ),
    Defect(
        "passes read a version while its other shards are under way",
        "runtime/rank",
        'yield from self.complete(each, f"{each.name}, batch {batch}")',
        "pass",
        ("tests/runtime/test_sharded_state.py",),
    ),
    Defect(
        "a run ends while shards are under way",
        "runtime/execute",
        'yield from span.complete(stage, f"{stage.name}, the end of the run")',
        "pass",
        ("tests/runtime/test_sharded_state.py",),
    ),
    Defect(
        "further pipelines save no rows of the optimizer's state",
        "runtime/rank",
        "elif isinstance(weights, TrainedWeights) and isinstance(weights.store, ShardedStore):",
        "elif False:",
        ("tests/runtime/test_sharded_snapshots.py",),
    ),
    Defect(
        "the average moves when only the own shard of a version is there",
        "stage",
        "self.pending = factor  # the rest of the version comes later",
        "self._updated(factor)",
        ("tests/runtime/test_sharded_snapshots.py",),
    ),
    # --- weights as shards --------------------------------------------------------------------------------------------
    Defect(
        "a release leaves the memory of the weights",
        "weights",
        'comes while it is not whole"\n            )\n        self.gathered.free()',
        'comes while it is not whole"\n            )',
        ("tests/runtime/test_fully_sharded.py",),
    ),
    Defect(
        "filling in gathered weights counts as a write",
        "weights/memory",
        "{key: view.data for key, view in self.views.items()}",
        "dict(self.views)",
        ("tests/weights/test_resized_buffer.py", "tests/runtime/test_fully_sharded.py"),
    ),
    Defect(
        "memory that has no content yet may be read",
        "weights/memory",
        "            self._content, self.epoch = self.epoch, NOT_WHOLE\n        self.allocated = False",
        "            self._content = self.epoch\n        self.allocated = False",
        ("tests/weights/test_resized_buffer.py",),
    ),
    Defect(
        "a backward takes the place of a gradient whose sum is under way",
        "runtime/update",
        "return None if ticket is None or ticket.done else ticket",
        "return None",
        ("tests/runtime/test_fully_sharded.py",),
    ),
    Defect(
        "a further part of a sum replaces the ones before",
        "weights",
        "(place.add_ if further else place.copy_)(rows)",
        "place.copy_(rows)",
        ("tests/runtime/test_fully_sharded.py",),
    ),
    Defect(
        "evaluations within a run do not gather what was released",
        "runtime/update",
        "rest = [stage for stage in all_ if not stage.weights.gathered]",
        "rest = [stage for stage in all_ if False]",
        ("tests/runtime/test_sharded_snapshots.py",),
    ),
    Defect(
        "the average stands still where weights are rows",
        "stage",
        "if factor and self.average_rows is not None and self.store.rows is not None:",
        "if False:",
        ("tests/runtime/test_sharded_snapshots.py",),
    ),
    Defect(
        "what users write between two runs is lost where weights are rows",
        "weights/memory",
        "self.own.load(self.present)",
        "pass",
        ("tests/runtime/test_fully_sharded.py",),
    ),
    Defect(
        "the failure of a sum is not passed on where its rows are kept apart",
        "runtime/update",
        "settled.complete(error=error)",
        "settled.complete(error=error) if error is None else None",
        ("tests/runtime/test_sharded_faults.py",),
    ),
)
