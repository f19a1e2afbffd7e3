"""The hand-written schedules: each is legal and has the figures that its paper, or counting by hand, gives it."""

from fractions import Fraction
from pathlib import Path

import pytest

from penstock.schedule.proof.check import check
from penstock.schedule.text_parser import parse_schedule

FOLDER = Path(__file__).parents[1] / "golden"


def proof_of(name):
    return check(parse_schedule((FOLDER / f"{name}.txt").read_text(), name))


def facts(name, what):
    """One fact of every stage, in the order of the file's `stages` line."""
    proof = proof_of(name)
    return [getattr(proof.stages[stage], what) for stage in proof.schedule.stages]


def delays(name):
    return [tuple(delay) for delay in facts(name, "delay")]


# Peak activations per rank, in microbatches on the rank's whole share.
PEAKS = {
    "blend": [2, 1],  # as stashing: d - s
    "breadth_first": [2, 2],  # m on every rank
    "chimera": [3, 4, 4, 3],  # between D - D/2 + 1 and D
    "dualpipe_v": [Fraction(5, 2)] * 2,  # p + 1/2
    "evaluation": [1, 1],  # nothing is kept
    "frozen_front": [1, 2, 1],  # stage 0 keeps nothing; behind it 1F1B over two ranks
    "interleaved": [Fraction(5, 2), Fraction(3, 2)],  # rank r: p + (p - 1 - 2r)/v
    "local_losses": [1, 1],  # each backward follows its forward
    "nf1b": [6, 4],  # rank 0 forwards 2 (p - 1) microbatches before it drops the last batch's
    "offload": [3, 4],  # GPipe's 4 but for the one that is away when F3 runs
    "parked": [2, 2],  # GPipe's 3 but for one, which counts on the other rank
    "periodic_averaging": [2, 1],
    "pipemare_recompute": [1, 1],  # recomputed for one backward at a time
    "post_validation": [3, 2],  # GPipe on rank 0; I0 frees nothing before W0, so 1F1B holds 2
    "seq1f1b": [Fraction(3, 2), 1],  # (p - r - 1 + k)/k
    "swapped": [2, 2],  # breadth-first: m
    "two_branches": [2, 2, 1],  # both towers are one hop before the head
    "wave_synchronous": [2, 1],
    "xpipe": [2, 1],
    "zb_h1": [3, 3, 3],  # p on every rank where activations are freed at W
    "zb_v": [2, 2],  # p
}


def test_every_golden_file_has_an_expectation():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(PEAKS)


@pytest.mark.parametrize("name", PEAKS)
def test_peak_activations_of_golden_files(name):
    assert list(proof_of(name).activations) == PEAKS[name]


VERSIONS = {
    "blend": [2, 1],  # the forward's version is kept for the blend
    "post_validation": [2, 2],  # the valid and the provisional one
    "wave_synchronous": [2, 1],  # stashing: ceil((d - 1 - s)/m) + 1
}


@pytest.mark.parametrize("name", PEAKS)
def test_live_versions(name):
    stages = len(proof_of(name).schedule.stages)
    assert facts(name, "versions") == VERSIONS.get(name, [1] * stages)


COPIES = {"blend": [1, 1], "xpipe": [2, 2]}  # XPipe: one for the forwards, one for the backwards


@pytest.mark.parametrize("name", PEAKS)
def test_live_copies(name):
    stages = len(proof_of(name).schedule.stages)
    assert facts(name, "copies") == COPIES.get(name, [0] * stages)


BUFFERS = {
    "blend": [3, 2],  # two versions and a gradient
    "evaluation": [1, 1],  # no gradient
    "frozen_front": [1, 2, 2],
    "post_validation": [3, 3],  # the gradient stays until the decision, for an update that may be done again
    "wave_synchronous": [3, 2],
}


@pytest.mark.parametrize("name", PEAKS)
def test_buffers(name):
    """Versions and gradients together."""
    stages = len(proof_of(name).schedule.stages)
    assert facts(name, "buffers") == BUFFERS.get(name, [2] * stages)


# Mean updates between the version read and the version updated: (forward, backward) per stage.
DELAYS = {
    "blend": [(1, 1), (0, 0)],  # counted from the older version of the blend
    "nf1b": [(0.5, 0), (0, 0)],  # F0 and F1 read t-1, F2 and F3 t
    "pipemare_recompute": [(0.5, 0), (0, 0)],  # F0 reads t-1, F1 reads t
    "wave_synchronous": [(1, 1), (0, 0)],
    "xpipe": [(1, 0), (0, 0)],  # the forwards predict from t-1, the backwards from t
}


@pytest.mark.parametrize("name", PEAKS)
def test_delays_of_golden_files(name):
    stages = len(proof_of(name).schedule.stages)
    assert delays(name) == DELAYS.get(name, [(0, 0)] * stages)


@pytest.mark.parametrize("name", PEAKS)
def test_every_rank_holds_what_the_file_says(name):
    schedule = proof_of(name).schedule
    for rank, program in enumerate(schedule.programs):
        used = {part.stage for action in program.period for part in action.parts or (action,)}
        assert used == set(schedule.on_rank(rank))


def test_dualpipe_v_holds_the_same_however_its_pairs_are_written():
    """A fused pair takes its forward's activations before it frees its backward's, whichever is named first."""
    text = (FOLDER / "dualpipe_v.txt").read_text()
    pairs = [token for token in text.split() if token.startswith("[")]
    assert len(pairs) == 6
    for pair in pairs:
        forward, backward = pair.strip("[]").split("+")
        text = text.replace(pair, f"[{backward}+{forward}]")
    assert list(check(parse_schedule(text)).activations) == PEAKS["dualpipe_v"]
