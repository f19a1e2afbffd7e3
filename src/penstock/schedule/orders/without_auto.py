"""Why an order cannot have as many microbatches in flight as its links ask for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ALL = "it has all microbatches of a batch in flight anyway"
_SEARCHED = "its order is searched for given times, messages (hop=) and memory (limit=); set these options"
_BY_ITS_PAPER = "its passes stand where its paper puts them, for a number in flight that follows from the ranks"
_GREEDY = "simulated, messages cost it as much with any larger number, as it is made for messages that take no time"

WITHOUT_AUTO: Mapping[str, str] = MappingProxyType(
    {
        "sequential": "it has one microbatch in flight, by definition",
        "gpipe": _ALL,
        "eager-1f1b": "it has 2 p - 1 on the first rank by definition; take 1f1b, which has them if links ask",
        "endless-eager-1f1b": "it has 2 p - 1 on the first rank by definition; take 2bw, which has them if links ask",
        "fine-grained": "it is PipeMare's own, whose delays are those of 2 (p - r) microbatches on rank r",
        "breadth-first": _ALL,
        "endless-breadth-first": _ALL,
        "zb-auto": _SEARCHED,
        "zb-exact": _SEARCHED,
        "v-half": "it has half as many as zb-v in order to save memory; zb-v takes more for slow links",
        "v-min": "it has a third as many as zb-v in order to save memory; zb-v takes more for slow links",
        "v-auto": _SEARCHED,
        "hanayo": _GREEDY,
        "chimera": _BY_ITS_PAPER,
        "dualpipe": _BY_ITS_PAPER,
        "dualpipe-v": _BY_ITS_PAPER,
        "bitpipe": _GREEDY,
        "seq1f1b": "it has slices of sequences in flight, as many as its paper says",
        "terapipe": _ALL,
        "bpipe": "it moves activations between ranks that hold those of 1F1B's numbers",
        "vocabulary-1f1b": "its passes of the divided output layer stand where 1F1B's numbers put them",
        "nf1b": "how far its forwards run ahead makes its delay, so it is an option of its own (ahead=)",
        "forward-only": "it has no backwards to wait for",
    }
)
"""Every order that does not take `in_flight="auto"`, with the reason."""


def auto_refused(what: str, order: object, given: object) -> str:
    """Say that an order takes no `auto`, and why.

    Args:
        what: was asked for, such as "method gpipe".
        order: its order, by name; another one is a user's own.
        given: `auto` or its like.
    """
    why = WITHOUT_AUTO.get(str(order), "nothing is known of how an order of your own goes on with another number")
    return f"{what} does not take in_flight={given!r}: {why}. Leave it out"
