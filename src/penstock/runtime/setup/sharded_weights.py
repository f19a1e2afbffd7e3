"""Weights of a stage that parallel pipelines divide among them: the store, and what of it the optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.comm.communicators import holders_of
from penstock.comm.core.rank_grid import Holder
from penstock.errors import CapabilityError
from penstock.partition.tied import Tie
from penstock.schedule.ir.schedule import Op, Stage
from penstock.schedule.ir.sharding import Level
from penstock.schedule.ir.version_rules import RULES, Update
from penstock.schedule.proof.proof import Proof
from penstock.schedule.proof.unsharded_peaks import sums_wait
from penstock.stage.blocks.module import StageModule
from penstock.weights.fully_sharded.full_precision_versions import ExactShardsOfVersions
from penstock.weights.fully_sharded.mixed_versions import MixedShardsOfVersions
from penstock.weights.fully_sharded.one_version import FullyShardedExactStore, FullyShardedMixedStore
from penstock.weights.memory.buffers import Buffer
from penstock.weights.optim.optimizer_adapters import takes_rows
from penstock.weights.optim.step_hooks import HOOKS_ON_ROWS, hooks_take_rows
from penstock.weights.sharded_mixed_store import ShardedMixedStore
from penstock.weights.sharded_store import ShardedStore
from penstock.weights.store import VersionStore
from penstock.weights.updates.updater import Updater


def make_sharded_store(
    module: StageModule, stage: Stage, proof: Proof, width: int, pipeline: int, low: torch.dtype | None
) -> ShardedStore:
    """Make the store of a stage.

    Args:
        module: its blocks.
        stage: which.
        proof: of a sharded schedule.
        width, pipeline: the number of pipelines, and which of them this is.
        low: the precision of passes, if not that of the weights.
    """
    members = holders_of(proof.schedule, width)[stage.index]
    holders, place = len(members), members.index(Holder(pipeline, stage))
    level, facts, where = proof.schedule.sharding.level, proof.stages[stage], module.where
    overlapping = RULES[proof.schedule.rule].update is Update.ROTATE
    if low is not None:
        kind = ShardedMixedStore
        if level is Level.FULL:
            kind = MixedShardsOfVersions if overlapping else FullyShardedMixedStore
        return kind(module.tensors.trained, facts, where, level, holders, place, low, module.tensors.full)
    if level is not Level.FULL:
        return ShardedStore(module.tensors.trained, facts.buffers, where, level, holders, place)
    if overlapping:
        return ExactShardsOfVersions(module.tensors.trained, facts.buffers, where, holders, place)
    return FullyShardedExactStore(module.tensors.trained, where, holders, place)


def divide_updates(store: ShardedStore, updater: Updater, ties: Sequence[Tie], stage: Stage) -> None:
    """Let an optimizer step the own rows, or whole parameters where it needs these.

    Args:
        store: of the stage.
        updater: has the optimizer.
        ties: parameters that other stages share.
        stage: which.

    Raises:
        CapabilityError: it cannot.
    """
    if updater.optimizer is None:
        return
    if not hooks_take_rows(updater.optimizer):
        raise CapabilityError(f"{store.where}: {updater.name} {HOOKS_ON_ROWS}")
    whole = not takes_rows(updater.optimizer)
    store.divide(whole=whole)
    if ties and whole and store.splits_gradients:  # else every holder has the sums of all parameters
        raise CapabilityError(
            f"{store.where} shares {ties[0].names_at(stage.index)[0]} with another stage, which may have the sum of "
            f"its gradient on another rank, as {updater.name} has to step whole parameters; take sharding=optimizer, "
            "with which every rank has all sums, or untie them"
        )
    updater.divide(store.shards, store.own_of(store.master))


def fit_sums(store: ShardedStore, proof: Proof, stage: Stage, low_precision: bool) -> None:
    """Decide where sums of gradients wait for their update, under a schedule."""
    period = proof.schedule.program(stage.rank).period
    parts = sum(action.op is Op.REDUCE and action.stage == stage for action in period)
    store.keep_sums_apart(sums_wait(proof.schedule, stage.rank, low_precision), max(parts, 1))


def average_of(store: VersionStore, where: str) -> Buffer:
    """Return room for an average of the weights, which begins with them."""
    average = Buffer(store.layout, f"average of {where}")
    average.load(store.master.views)
    return average
