"""Published figures of sharded state: counts, traffic, memory and what is hidden, each with its source.

Bubbles, activations and times of the same papers are in test_orders_in_time.py, Fast-LLM's bytes in
test_state_bytes.py.

LGA: Lamy-Poirier, arXiv 2106.02679. BFPP: the same, arXiv 2211.05953. ZeRO: arXiv 1910.02054.
Fast-LLM: its code (`fast_llm/engine/schedule/schedule.py`, `engine/multi_stage`), commit 7d61a1ba.
"""

from fractions import Fraction

import pytest

from penstock.schedule.build import prove
from penstock.schedule.ir.schedule import Op
from penstock.simulate.costs import Costs, StageCost
from penstock.simulate.sharding_traffic import Network
from penstock.simulate.simulate import simulate_schedule
from support.state_bytes import state_bytes

GIB = 2**30
DF, BF = "interleaved", "breadth-first"


COUNTS = {  # P = 4, M = 8, two buffers of each kind, direct-mapped: restores and reductions of every rank
    "GPipe (BFPP, N_loop = 1)": ("gpipe", {}, [1] * 4, [1] * 4),
    "1F1B (BFPP, N_loop = 1)": ("1f1b", {}, [1] * 4, [1] * 4),
    "depth-first (Fast-LLM's rule, N_loop = 4)": (DF, {"chunks": 4}, [20, 12, 16, 24], [8] * 4),
    "breadth-first (Fast-LLM's rule, N_loop = 4)": (BF, {"chunks": 4}, [6] * 4, [4] * 4),
}


@pytest.mark.parametrize(("method", "options", "restores", "reductions"), COUNTS.values(), ids=COUNTS)
def test_restores_and_reductions(method, options, restores, reductions):
    proof = prove(method, 4, 8, options=options, sharding="full:weights=2:gradients=2:cache=direct")
    assert [s.gathers for s in proof.shards] == restores
    assert [s.reductions for s in proof.shards] == reductions


# --- traffic ----------------------------------------------------------------------------------------------------------

LAYERS = 6
TRAFFIC = {  # bytes in and out per parameter and batch of 16-bit numbers, (n - 1) / n left out (LGA)
    "replicated, either order": (None, "none", lambda m: 8),
    "like ZeRO-2, ordinary accumulation": (1, "gradients:gradients=1", lambda m: 4 * m + 4),
    "like ZeRO-2, layered": (None, "gradients:gradients=1", lambda m: 8),
    "like ZeRO-3, ordinary accumulation": (1, "full:weights=1:gradients=1", lambda m: 12 * m),
    "like ZeRO-3, layered": (None, "full:weights=1:gradients=1", lambda m: 12),
}


@pytest.mark.parametrize(("group", "sharding", "published"), TRAFFIC.values(), ids=TRAFFIC)
def test_traffic_of_ordinary_and_layered_accumulation(group, sharding, published):
    """Less what need not be gathered, of which the formula knows nothing: a layer that is used twice in a row.

    That is the last one, between its forward and its backward; and with ordinary accumulation the first one, between
    the backward of a microbatch and the forward of the next.
    """
    for m in (1, 2, 4, 8):
        proof = prove(BF, 1, m, options={"chunks": LAYERS} | ({"group": 1} if group else {}), sharding=sharding)
        network = Network(proof.schedule, 4, 1.0, 1 / LAYERS, 2, 2)
        if sharding == "none":
            sent = sum(network.sent_for(Op.REDUCE, stage) for stage in proof.schedule.stages)
        else:
            sent = sum(network.per_batch(0).values())
        again = 0 if "full" not in sharding else 1 if group is None else 2 * m - 1
        assert 2 * sent * 4 / 3 == pytest.approx(published(m) - 4 * again / LAYERS)


VOLUME = {"gradients": 2, "full": 3}  # elements per parameter and step (ZeRO sec. 7.2: 2 Psi and 3 Psi)


@pytest.mark.parametrize(("level", "elements"), VOLUME.items())
def test_volume_of_zero(level, elements):
    """Of a microbatch in a step, where each layer is gathered for its forward and again for its backward.

    (Level optimizer takes 3 here, not ZeRO-1's 2: its sum is whole, so that nothing but updates needs to know of it.)
    """
    proof = prove(BF, 1, 1, options={"chunks": 40}, sharding=level + (":weights=1" if level == "full" else ""))
    sent = sum(Network(proof.schedule, 64, 1.0, 1 / 40, 1, 1).per_batch(0).values())
    saved = Fraction(1, 40) if level == "full" else 0
    assert sent == pytest.approx(float(63 * (elements - saved) / 64))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_zero_3_of_7_5_billion_parameters_on_64_devices():
    """16 Psi / N_d = 1.9 GB (ZeRO fig. 1), but for the layers that are whole."""
    proof = prove(BF, 1, 1, options={"chunks": 40}, sharding="full:weights=1:gradients=1")
    held = state_bytes(proof, 0, 64, low_precision=True)
    whole = held.weights + held.gradients
    assert whole == Fraction(2 + 4, 40)
    assert 7.5 * float(sum(held) - whole) == pytest.approx(1.875)


X = {"layers": 160, "hidden": 25600, "sequence": 2560}  # X_160 (LGA): d_l = x, d_m = x^2, d_s = 16 x
LAYER = 12 * X["hidden"] ** 2


def test_memory_of_x_160_on_483_devices():
    """State 29.1 GiB (12 p / n_b), three buffers of a layer 43.9 GiB, checkpoints 97.7 GiB, each of 125 MiB (LGA)."""
    proof = prove(BF, 1, 5, options={"chunks": 10}, sharding="full:weights=2:gradients=1")  # each of 16 layers
    held, parameters = state_bytes(proof, 0, 483, low_precision=True), X["layers"] * LAYER
    assert parameters == pytest.approx(1.258e12, rel=1e-3)
    assert float(held.master + held.optimizer) * parameters / GIB == pytest.approx(29.1, abs=0.05)
    (shards,) = proof.shards
    assert (shards.gathered, shards.gradients) == (2, 1)
    assert (shards.gathered + shards.gradients) * 2 * LAYER / GIB == pytest.approx(43.9, abs=0.05)
    checkpoint = 2 * X["sequence"] * X["hidden"]  # bytes of a layer's input
    assert checkpoint == 125 * 2**20
    assert float(proof.activations[0]) * X["layers"] * checkpoint / GIB == pytest.approx(97.7, abs=0.05)


@pytest.mark.parametrize(("m", "hidden"), [(4, False), (5, True), (6, True)])
def test_five_microbatches_hide_the_gathers_of_x_160(m, hidden):
    """(1/2) n_mu b_mu d_s FLOP per byte against the 6240 of an A100 on 200 Gb/s InfiniBand: 5120, 6400 and 7680 (LGA).

    What no number of microbatches hides is the first gather of a batch and the last sum.
    """
    layers, peak, bandwidth = 8, 312e12, 25e9  # FLOP/s; bytes per second each way
    forward = 2 * LAYER * X["sequence"] / peak
    proof = prove("layered", 1, m, options={"chunks": layers})
    network = Network(proof.schedule, 483, bandwidth, LAYER, 2, 2)
    costs = StageCost(forward, 2 * forward, forward)  # a backward with its recompute takes 3 forwards
    found = simulate_schedule(proof, Costs((costs,) * layers, network=network))
    stage = proof.schedule.stages[0]
    borders = sum(network.sent_for(op, stage) for op in (Op.GATHER, Op.REDUCE)) / bandwidth
    assert (found.shards.exposed == pytest.approx(borders)) == hidden
    assert found.shards.exposed >= borders * (1 - 1e-9)
    assert (m / 2 * X["sequence"] >= peak / (2 * bandwidth)) == hidden
