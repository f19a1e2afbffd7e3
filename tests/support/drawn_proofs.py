"""Strategies: proofs of golden files and of small schedules of any method, and times for their passes."""

from pathlib import Path

from hypothesis import strategies as st

from penstock.schedule.proof.check import check
from penstock.schedule.proof.proof import Proof
from penstock.schedule.text_parser import parse_schedule
from support.schedules import make_schedule
from support.smallest_batch import CHAINS, least

GOLDEN = [
    check(parse_schedule(path.read_text(), path.stem))
    for path in sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
]
positive = st.floats(0.01, 100.0)
maybe = st.just(0.0) | positive


@st.composite
def proofs(draw: st.DrawFn, golden: bool = True) -> Proof:
    """Draw a proof: of a golden file, where these are wanted, or of a method."""
    if golden and draw(st.booleans()):
        return draw(st.sampled_from(GOLDEN))
    stages, method = draw(st.integers(1, 5)), draw(st.sampled_from(list(CHAINS)))
    fewest = max(stages - 1, least(method, stages))
    return check(make_schedule(method, stages, draw(st.integers(fewest, max(fewest, 7)))))
