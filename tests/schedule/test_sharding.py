"""Sharded state: where stages are gathered, reduced and released, and what the proof derives and refuses."""

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.runtime.plan.capabilities import check_offered
from penstock.schedule.add_options import extend, extended
from penstock.schedule.build import ScheduleRequest, prove
from penstock.schedule.ir.schedule import Op, Stage
from penstock.schedule.ir.sharding import Cache, Level, Sharding, read_sharding
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.methods.table import METHODS
from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule
from penstock.schedule.transforms.gather_slots import stays
from penstock.simulate.costs import Costs
from penstock.simulate.long_run import steady_bubble
from penstock.simulate.sharding_traffic import Network

FLUSHED = [name for name, row in METHODS.items() if row.rule == "flush"]
LEVELS = ("optimizer", "gradients", "full")


def counts(proof):
    return [s.gathers for s in proof.shards], [s.reductions for s in proof.shards]


@pytest.mark.parametrize(("p", "v", "k"), [(2, 2, 1), (4, 4, 2), (3, 4, 3), (4, 2, 2), (2, 5, 4)])
def test_breadth_first_gathers_2v_minus_k_times_whatever_m(p, v, k):
    """The last k chunks of the forward are the first of the backward (arXiv 2211.05953); each is reduced once."""
    for m in (p, 2 * p, 8 * p):
        proof = prove("breadth-first", p, m, options={"chunks": v}, sharding=f"full:weights={k}")
        assert counts(proof) == ([2 * v - k] * p, [v] * p)
        assert all(s.gathered == k for s in proof.shards)


def test_depth_first_gathers_as_published_for_direct_mapped_places():
    """Restores and reductions of Fast-LLM's rule at p = v = 4, m = 8 with two buffers of each kind."""
    direct = prove("interleaved", 4, 8, options={"chunks": 4}, sharding="full:weights=2:gradients=2:cache=direct")
    assert counts(direct) == ([20, 12, 16, 24], [8, 8, 8, 8])
    optimal = prove("interleaved", 4, 8, options={"chunks": 4}, sharding="full")
    for best, other in zip(counts(optimal), counts(direct), strict=True):
        assert all(a <= b for a, b in zip(best, other, strict=True))
    more = prove("interleaved", 4, 16, options={"chunks": 4}, sharding="full")
    assert all(a < b for a, b in zip(counts(optimal)[0], counts(more)[0], strict=True))  # it grows with m


def fewest_loads(uses, slots):
    """The least of all choices of who gives up a place."""

    @cache
    def least(position, held):
        if position == len(uses):
            return 0
        stage = uses[position]
        if stage in held:
            return least(position + 1, held)
        rests = [held] if len(held) < slots else [held - {other} for other in held]
        return 1 + min(least(position + 1, rest | {stage}) for rest in rests)

    return least(0, frozenset())


def test_no_choice_of_places_loads_less_than_the_optimal_one():
    random = Random(28)
    for stages, slots in product((2, 3, 4), (1, 2, 3)):
        for _ in range(20):
            uses = [Stage(random.randrange(stages), 0, 0) for _ in range(12)]
            found = stays([{stage} for stage in uses], slots)
            assert len(found) == fewest_loads(tuple(uses), slots)
            assert len(found) <= len(stays([{stage} for stage in uses], slots, Cache.DIRECT))
            for position, stage in enumerate(uses):
                here = [s for s in found if s.first <= position <= s.last]
                assert stage in {s.stage for s in here}
                assert len(here) <= slots
            # a load begins at the release of another one, so at no time more than the places are taken
            for position in range(-1, len(uses)):
                assert sum(s.since <= position < s.last for s in found) <= slots


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", FLUSHED)
def test_every_flushed_order_is_proven_at_every_level(method, level):
    stages, m = 4, 8
    proof = prove(method, stages, m, sharding=level)
    assert parse_schedule(str(proof.schedule)) == proof.schedule
    assert proof.schedule.sharding.level == level
    if level == "full":
        assert all(0 < s.gathered <= proof.schedule.sharding.weights for s in proof.shards)
    else:
        stages_of = [len(proof.schedule.on_rank(rank)) for rank in range(proof.schedule.ranks)]
        assert [s.gathers for s in proof.shards] == stages_of  # one each, behind its STEP


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
@pytest.mark.parametrize(("stages", "m"), [(1, 1), (2, 1), (2, 4), (3, 2), (4, 3), (4, 16)])
def test_2bw_keeps_its_three_buffers_and_updates_in_the_slack(stages, m, level):
    """The sum lies in the gradient's buffer, STEP writes a shard over it, a GATHER in place completes the version."""
    proof = prove("2bw", stages, m, sharding=level)
    plain = prove("2bw", stages, m)
    for stage, facts in proof.stages.items():
        assert facts.buffers == plain.stages[stage].buffers <= 3
        assert facts.delay == plain.stages[stage].delay
    for program in proof.schedule.programs:
        (step,) = [i for i, a in enumerate(program.period) if a.op is Op.STEP]
        gather = program.period[step + 1]
        assert gather.op is Op.GATHER
        assert gather.reads.versions == (gather.unit.first + 1,)
        if m == 16:  # room on both sides: the sum is not waited for at once, nor the gather
            assert program.period[step - 1].op is not Op.REDUCE
            assert 0 < step < len(program.period) - 2


FAULTS = [
    ("GATHER[t-1]^t", "", -1, "after draining 1 batches, rank 0 still has only its own shard of version [1]"),
    ("GATHER[t-1]^t", "GATHER[t-1]^t-1", 1, "gathers version t-1, which is whole already"),
    ("GATHER[t-1]^t", "GATHER[t-1]^t RELEASE[t-1]^t", 1, "releases weights that stay whole with sharding gradients"),
    ("REDUCE[t-1]", "REDUCE[t-1] REDUCE[t-1]", -1, "rank 0, REDUCE[t-1]: adds nothing: no backward of"),
    ("STEP[t-1] GATHER[t-1]^t", "GATHER[t-1]^t STEP[t-1]", 1, "reads version t, which does not exist yet"),
]  # fmt: skip


@pytest.mark.parametrize(("there", "instead", "times", "said"), FAULTS)
def test_faults_in_sharded_2bw_are_found(there, instead, times, said):
    text = str(prove("2bw", 2, 3, sharding="gradients").schedule)
    assert there in text
    with pytest.raises(ScheduleError) as caught:
        check(parse_schedule(text.replace(there, instead, times)))
    assert said in str(caught.value)


def test_a_pass_that_reads_a_version_before_it_is_complete_is_refused():
    text = str(prove("2bw", 1, 2, sharding="optimizer").schedule)
    late = text.replace("F0^t-1", "F0^t-1 GATHER[t-2]^t-1").replace(" GATHER[t-1]^t", "", 1)
    late = late.replace("drain 0: STEP[t-1]", "drain 0: GATHER[t-2]^t-1 STEP[t-1]")
    assert late.count("GATHER") == 3
    with pytest.raises(ScheduleError, match=r"F0\^t-1: reads version t-1, of which only the own shard is"):
        check(parse_schedule(late))


def test_an_optimizer_sharded_gradient_is_not_summed_twice():
    text = str(prove("1f1b", 2, 2, sharding="optimizer").schedule).replace("REDUCE[t]", "REDUCE[t] REDUCE[t]", 1)
    with pytest.raises(ScheduleError, match="has 2 REDUCEs per batch"):
        check(parse_schedule(text))


@pytest.mark.parametrize(
    ("method", "level", "said"),
    [
        ("2bw", "full", "sharding full does not go with rule 'double-buffer': batches overlap"),
        (
            "stash",
            "optimizer",
            "sharding optimizer goes with the rules flush and double-buffer so far, not with 'stash'",
        ),
        ("zb-h2-post", "full", "not with 'provisional'"),
        (
            "2bw-ahead",
            "full",
            "take optimizer or gradients, or a breadth-first order: layered, which flushes, or 2bw-layered",
        ),
        (
            "error-feedback",
            "gradients",
            "does not go with correction 'error-feedback', which is not known to work on a",
        ),
        ("error-feedback", "optimizer", "take 2bw or 2bw-ahead, or set sharding to none"),
        (
            "2bw-layered",
            "full:cache=direct",
            "two versions of a stage want its one place; cache=direct goes",
        ),
        ("chimera", "full:gradients=1", "stages have several copies in the pipeline, whose gradients stay whole"),
        ("spectrain", "gradients", "not with 'predicted'"),
        ("1f1b", "zero-3", "unknown sharding 'zero-3'. Known: none, optimizer (as ZeRO-1), gradients (ZeRO-2), full"),
        ("1f1b", "optimizer:gradients=2", "sharding 'optimizer' has no options; got 'gradients=2'"),
        ("1f1b", "full:weights=0", "weights of a sharding is a whole number from 1 to 999999; got '0'"),
        ("1f1b", "full:cache=lru", "the cache of a sharding is optimal or direct; got 'lru'"),
        ("dualpipe", "full:weights=1", "at once, for which 1 place does not do; allow more of them"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(method, level, said):
    with pytest.raises(ConfigError) as caught:
        prove(method, 4, 8, sharding=level)
    assert said in str(caught.value)


def test_rules_that_cannot_be_sharded_are_refused_all():
    refused = {row.rule for row in METHODS.values()} - {"flush", "double-buffer"}
    assert refused < RULES.keys()
    for rule in refused:
        name = next(name for name, row in METHODS.items() if row.rule == rule)
        for level in LEVELS:
            with pytest.raises(ConfigError, match="set sharding to none"):
                prove(name, 4, 8, sharding=level)


def test_a_sharding_is_read_as_it_is_written():
    for sharding in (Sharding(), Sharding(Level.FULL, 3, 1, Cache.DIRECT), Sharding(Level.GRADIENTS, None, 2)):
        assert read_sharding(str(sharding)) == sharding
    assert str(Sharding(Level.FULL, 2, 2)) == "full:weights=2:gradients=2"


def test_recomputed_forwards_read_gathered_weights():
    plain = prove("breadth-first", 2, 4)
    proof = extend(plain, recomputes=True, sharding="full")
    assert any(a.op is Op.R for a in proof.schedule.programs[0].period)
    assert counts(proof) == ([2, 2], [2, 2])
    with pytest.raises(ConfigError, match="add recomputes first"):
        extend(prove("breadth-first", 2, 4, sharding="full"), recomputes=True)
    with pytest.raises(ConfigError, match="sharded already"):
        extend(proof, sharding="full")


@pytest.mark.parametrize(
    ("name", "order"), [("layered", "breadth-first"), ("lga", "breadth-first"), ("modular", "breadth-first"),
                        ("depth-first-full", "interleaved")]
)  # fmt: skip
def test_a_method_may_be_sharded_by_itself_and_a_user_may_say_otherwise(name, order):
    row = METHODS[prove(name, 2, 4).schedule.name]
    assert row.needs_sharded_state
    assert (row.order, row.sharding) == (order, "full")
    own, other, none = (prove(name, 2, 4, sharding=given).schedule for given in (None, "gradients", "none"))
    assert [str(s.sharding).split(":")[0] for s in (own, other, none)] == ["full", "gradients", "none"]
    assert replace(own, name=order) == prove(order, 2, 4, sharding="full").schedule
    assert replace(none, name=order) == prove(order, 2, 4).schedule


def test_methods_know_the_levels_that_they_take():
    both, every = (Level.OPTIMIZER, Level.GRADIENTS), (Level.OPTIMIZER, Level.GRADIENTS, Level.FULL)
    levels = {name: row.shardings for name, row in METHODS.items()}
    assert {name for name, found in levels.items() if found == every} == {*FLUSHED, "2bw-layered"}
    assert {name for name, found in levels.items() if found == both} == {"2bw", "2bw-eager", "2bw-ahead"}
    assert {len(found) for found in levels.values()} == {0, 2, 3}
    for name, found in levels.items():
        for level in every:
            if level not in found:
                with pytest.raises(ConfigError, match="; take .*|set sharding to none"):
                    prove(name, 4, 8, sharding=level)


@pytest.mark.parametrize(("p", "v", "k"), [(1, 2, 2), (2, 2, 2), (3, 2, 2), (4, 4, 3), (2, 5, 3)])
def test_endless_breadth_first_gathers_once_more_than_a_flush_and_is_never_idle(p, v, k):
    """2bw on fully sharded state: the backwards that a rank puts off read a version of their own, whatever m is."""
    for m in (max(2 * (p - 1), p + 1), 4 * p):
        proof = prove("2bw-layered", p, m, options={"chunks": v}, sharding=f"full:weights={k}")
        assert counts(proof) == ([2 * v - k + 1] * (p - 1) + [2 * v - k], [v] * p)
        assert all(s.gathered == k for s in proof.shards)
        assert all((f.delay.forward, f.delay.backward) == (1, 1) for f in proof.stages.values())
        assert all((f.versions, f.buffers) == (2, 3) for f in proof.stages.values())
        assert parse_schedule(str(proof.schedule)) == proof.schedule
        for backward in (1.0, 2.0, 3.0):
            costs = Costs.uniform(proof.schedule, 1.0, backward / 2, backward / 2)
            assert steady_bubble(proof.lowered, costs, proof.steady_from + 2) == pytest.approx(0, abs=1e-12)
    if k > 2:  # a place beyond those of the two stages that passes are at, so that its gathers are hidden
        network = Network.of_time(proof.schedule, 0.5)
        assert steady_bubble(
            proof.lowered, replace(Costs.uniform(proof.schedule), network=network), proof.steady_from + 2
        ) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "full:weights=1:gradients=1", "full:weights=9"])
@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (3, 2, 2), (2, 3, 5)])
def test_endless_breadth_first_is_proven_with_any_places_and_any_m(p, v, m, sharding):
    proof = prove("2bw-layered", p, m, options={"chunks": v}, sharding=sharding, decides=True)
    assert proof.schedule.sharding.level == sharding.split(":")[0]
    assert {f.buffers for f in proof.stages.values()} <= {2, 3}


def test_places_that_do_not_settle_are_refused():
    """Three versions take turns in two places, where more batches overlap than double buffering is for."""
    plain = ScheduleRequest("2bw", 2, 1, options={"in_flight": 3}).schedule
    with pytest.raises(
        ConfigError, match="2 gathered stages no batch is like the one before it on rank 0; take another"
    ):
        extended(plain, sharding="full:weights=2")


LAYERED_FAULTS = [
    ("GATHER[t-1]@0^t-2 F0@2", "GATHER[t-1]@0^t-1 F0@2", "reads version t-2, which is not gathered here"),
    ("RELEASE[t]@0^t-1 GATHER[t-1]@0^t-2", "GATHER[t-1]@0^t-2", "gathers version t-2, which is gathered already"),
    ("REDUCE[t-1]@0 B0@2", "B0@2", "stage 0 must run REDUCE for nothing"),
    ("GATHER[t]@0^t-1 GATHER", "GATHER[t]@0^t GATHER", r"F0@0\^t-1: reads version t-1, which is not gathered here"),
    ("RELEASE[t-1]@0^t-2 REDUCE", "REDUCE", r"rank 0 still has gathered weights of version \[-1\]"),
    ("drain 0: GATHER[t-1]@0^t-2 ", "drain 0: ", "which is not gathered here"),
]  # fmt: skip


@pytest.mark.parametrize(("there", "instead", "said"), LAYERED_FAULTS)
def test_faults_in_fully_sharded_2bw_are_found(there, instead, said):
    text = str(prove("2bw-layered", 2, 2).schedule)
    assert there in text
    with pytest.raises(ScheduleError, match=said):
        check(parse_schedule(text.replace(there, instead, 1)))


def test_the_runtime_offers_level_full_also_where_batches_overlap():
    check_offered(prove("1f1b", 2, 2, sharding="full").schedule)
    check_offered(prove("2bw-layered", 2, 3).schedule)
