"""The text form of schedules, printed by `str(schedule)` and parsed by `parse_schedule`.

    schedule 1f1b                     # the name; '#' starts a comment
    rule flush
    microbatches 2
    nodes 0@0 1@1                     # stage@rank, or stage.direction@rank
    edges 0>1                         # a chain when left out; 0|1 is an edge without a backward
    frozen 0                          # stages that are not trained
    segments 0,1 2,3                  # stages that recompute together
    window 4                          # messages outstanding on a lane; as few as cost no time when left out
    sharding full:weights=2           # what parallel pipelines split: optimizer, gradients or full; none when left out
    rank 0: F0^t F1^t B0^t B1^t STEP[t]
    rank 1: F0^t B0^t F1^t B1^t STEP[t]
    drain 0: ...                      # the epilogue, numbers relative to T

An action is OPERATION UNIT [@STAGE] [^READS]:

    F3        microbatch 3 of batch t; B-2 the last but one of batch t-1; B0..3 microbatches 0 to 3 as one unit;
              F3:1/2 the second of two slices; Fe0 an evaluation microbatch
    STEP[t-2] a batch unit; AVERAGE[t]%4 only after every fourth batch
    @4, @4.1  the stage, by stage and direction; may be left out where the rank holds one stage
    ^t-1      the version read; ^t,t-1 a blend; ^t~p0 the copy `p` that PREDICT0 made
    [F4+B0]   passes that run as one fused action

A file without updates is an order: the version rule adds them, and the versions where an action names none.
"""

from __future__ import annotations

import re

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule.ir.limits import MOST_MICROBATCHES
from penstock.schedule.ir.op_table import PASSES
from penstock.schedule.ir.order import Order
from penstock.schedule.ir.schedule import (
    Action,
    Copy,
    Edge,
    Kind,
    Op,
    Payload,
    Program,
    Schedule,
    Stage,
    Unit,
    WeightRef,
    chain,
    split_fused,
)
from penstock.schedule.ir.sharding import Sharding, read_sharding
from penstock.schedule.ir.version_rules import RULES
from penstock.schedule.transforms.apply_version_rule import apply_rule
from penstock.schedule.transforms.sharding import with_sharding

_N, _FEW = "[0-9]{1,6}", "[0-9]{1,3}"  # numbers of any kind; of batches before or after
_ACTION = re.compile(
    r"(?P<op>[A-Z]+)"
    rf"(?P<unit>\[t(?:[+-]{_FEW})?\](?:%{_FEW})?|e?-?{_N}(?:\.\.-?{_N})?(?::{_N}/{_N})?)"
    rf"(?:@(?P<stage>{_N}(?:\.{_N})?)(?:[<>](?P<peer>{_N}(?:\.{_N})?)/(?P<payload>[a-z]+))?)?"
    rf"(?:\^(?P<versions>t(?:[+-]{_FEW})?(?:,t(?:[+-]{_FEW})?)*)(?:~(?P<label>[a-z]+)(?P<copy>-?{_N}))?)?"
)
_UNIT = re.compile(rf"(e?)(-?{_N})(?:\.\.(-?{_N}))?(?::({_N})/({_N}))?")
_WORDS = ("schedule", "rule", "microbatches", "nodes", "edges", "frozen", "segments", "window", "sharding")
_SPLIT_PARTS = re.compile(r"\+(?=[A-Z])")


def parse_schedule(text: str, where: str = "schedule", unnamed: str = "unnamed") -> Schedule:
    """Parse a schedule from its text form.

    Args:
        text: the text form, as described in the module.
        where: a file name for error messages.
        unnamed: what it is called if it does not say so.

    Raises:
        ScheduleError: the text is malformed; the message names the line and the token.
    """
    header: dict[str, str] = {}
    lines: dict[tuple[str, int], tuple[int, str]] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        if match := re.fullmatch(rf"(rank|drain)\s+({_N})\s*:(.*)", line):
            key = (match[1], int(match[2]))
            if key in lines:
                raise ScheduleError(f"{where}:{number}: '{match[1]} {match[2]}' appears twice")
            lines[key] = (number, match[3])
        else:
            word, _, rest = line.partition(" ")
            if word not in _WORDS:
                raise ScheduleError(
                    f"{where}:{number}: unknown line {word!r:.40}; lines begin with {', '.join(_WORDS)}, rank N: or "
                    "drain N:, as penstock show prints them"
                )
            if word in header:
                raise ScheduleError(f"{where}:{number}: the line {word!r} appears twice")
            header[word] = rest.strip()
    return _assemble({"schedule": unnamed, **header}, lines, where)


def _assemble(header: dict[str, str], lines: dict[tuple[str, int], tuple[int, str]], where: str) -> Schedule:
    for word in ("microbatches", "nodes"):
        if not header.get(word):
            raise ScheduleError(f"{where}: the line '{word} ...' is missing")
    stages = tuple(_stage(token, where) for token in header["nodes"].split())
    most, given = max(n.index for n in stages), {n.index for n in stages}
    if most >= len(given):
        raise ScheduleError(
            f"{where}: stages must be numbered from 0 without gaps; there are {len(given)} and a {most}"
        )
    if max(n.rank for n in stages) > len(lines):  # a rank may be without a stage, but not without a line
        raise ScheduleError(f"{where}: the stages need ranks up to {max(n.rank for n in stages)}; they have no lines")
    ranks = 1 + max(n.rank for n in stages)
    rule = header.get("rule", "flush")
    if rule not in RULES:
        raise ScheduleError(f"{where}: unknown rule {rule!r}; known: {', '.join(RULES)}")
    missing = [r for r in range(ranks) if ("rank", r) not in lines]
    extra = sorted({r for _, r in lines if r >= ranks})
    if missing or extra:
        raise ScheduleError(f"{where}: the stages need ranks 0..{ranks - 1}; missing {missing}, unknown {extra}")

    def actions(what: str, rank: int) -> tuple[Action, ...]:
        number, line = lines.get((what, rank), (0, ""))
        try:
            return tuple(parse_action(token, stages, rank) for token in line.split())
        except ScheduleError as error:
            raise ScheduleError(f"{where}:{number}: {error}") from None

    programs = tuple(Program(actions("rank", r), actions("drain", r)) for r in range(ranks))
    edges = _edges(header["edges"], where) if "edges" in header else chain(1 + max(n.index for n in stages))
    name, m = header["schedule"], _integer(header["microbatches"], where)
    if m < 1:
        raise ScheduleError(f"{where}: a batch needs at least 1 microbatch, got {m}")
    units = sum(p.unit.count for program in programs for part in program for p in split_fused(part))
    if m > max(units, 1):
        raise ScheduleError(f"{where}: a batch of {m} microbatches needs more passes than the {units} in this file")
    frozen = frozenset(_integer(c, where) for c in header.get("frozen", "").split())
    segments = tuple(tuple(_integer(c, where) for c in s.split(",")) for s in header.get("segments", "").split())
    window = _integer(header["window"], where) if "window" in header else None
    if window is not None and window < 1:
        raise ScheduleError(f"{where}: a lane needs room for at least 1 message, got window {window}")
    sharding = _sharding(header.get("sharding", "none"), where)
    everything = [p for program in programs for part in program for p in split_fused(part)]
    if not any(a.op is Op.STEP for a in everything) and any(a.op in PASSES for a in everything):
        made = apply_rule(Order(programs, stages, edges, frozen, segments, window), RULES[rule], m, name)
        return with_sharding(made, sharding)
    return Schedule(name, m, stages, edges, programs, rule, frozen, segments, window, sharding)


def _sharding(text: str, where: str) -> Sharding:
    try:
        return read_sharding(text)
    except ConfigError as error:
        raise ScheduleError(f"{where}: {error}") from None


def parse_action(token: str, stages: tuple[Stage, ...], rank: int) -> Action:
    """Parse one action with relative numbers.

    Args:
        token: the action's text.
        stages: all stages of the schedule.
        rank: the rank to whose program the action belongs.

    Raises:
        ScheduleError: the token does not follow the grammar or names an unknown operation or stage.
    """
    if token.startswith("[") and token.endswith("]"):
        parts = tuple(parse_action(part, stages, rank) for part in _SPLIT_PARTS.split(token[1:-1]))
        if len(parts) < 2:
            raise ScheduleError(f"{token}: a fused action needs at least two passes, as in [F1+B0]")
        return Action(Op.FUSED, parts[0].stage, parts[0].unit, parts=parts)
    match = _ACTION.fullmatch(token)
    if match is None or match["op"] not in Op.__members__ or match["op"] == "FUSED":
        hint = "; separate actions by spaces" if re.search("[,;]", token) else ""
        upper = token.upper()
        hint = f"; did you mean {upper!r}?" if upper != token and _ACTION.fullmatch(upper) else hint
        raise ScheduleError(
            f"cannot read {token!r:.80}; an action is OPERATION UNIT [@STAGE] [^READS], as in F3 or F3@1^t-1{hint}"
        )
    op = Op(match["op"])
    reads = None
    if match["versions"]:
        derive = Copy(match["label"], int(match["copy"])) if match["label"] else None
        reads = WeightRef(tuple(_offset(v) for v in match["versions"].split(",")), derive)
    peer = _find(match["peer"], stages, None, token) if match["peer"] else None
    if match["payload"] and match["payload"] not in set(Payload):
        raise ScheduleError(f"{token}: unknown payload {match['payload']!r}; known: {', '.join(Payload)}")
    payload = Payload(match["payload"]) if match["payload"] else None
    return Action(op, _find(match["stage"], stages, rank, token), _unit(match["unit"]), reads, (), peer, payload)


def _unit(text: str) -> Unit:
    if text.startswith("["):
        batch, _, every = text.partition("%")
        if every and int(every) < 1:
            raise ScheduleError(f"{text}: %{every} matches no batch; %1 is every batch")
        return Unit(_offset(batch[1:-1]), kind=Kind.BATCH, every=int(every or 1))
    match = _UNIT.fullmatch(text)
    assert match is not None, text
    evaluation, first, last, piece, pieces = match.groups()
    count = int(last) - int(first) + 1 if last else 1
    if not 1 <= count <= MOST_MICROBATCHES or (pieces and not int(piece) < int(pieces) <= MOST_MICROBATCHES):
        raise ScheduleError(
            f"{text}: a range must be ascending, and slice j of k must have j < k; neither has more than "
            f"{MOST_MICROBATCHES} parts"
        )
    part = (int(piece), int(pieces)) if pieces else None
    return Unit(int(first), count, part, Kind.EVAL if evaluation else Kind.TRAIN)


def _offset(text: str) -> int:
    return int(text[1:] or 0)


def _find(name: str | None, stages: tuple[Stage, ...], rank: int | None, token: str) -> Stage:
    here = [n for n in stages if rank is None or n.rank == rank]
    found = [n for n in here if name is None or n.name == name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(n.name for n in here) or "none"
    raise ScheduleError(
        f"{token}: {'add the stage, @STAGE' if name is None else 'no such stage here'}; stages: {known}"
    )


def _stage(token: str, where: str) -> Stage:
    match = re.fullmatch(rf"({_N})(?:\.({_N}))?@({_N})", token)
    if match is None:
        raise ScheduleError(f"{where}: cannot read stage {token!r:.80}; write STAGE@RANK or STAGE.DIRECTION@RANK")
    return Stage(int(match[1]), int(match[2] or 0), int(match[3]))


def _edges(text: str, where: str) -> tuple[Edge, ...]:
    edges = []
    for token in text.split():
        match = re.fullmatch(rf"({_N})([>|])({_N})", token)
        if match is None:
            raise ScheduleError(
                f"{where}: cannot read edge {token!r:.80}; write 0>1, or 0|1 for one without a backward"
            )
        edges.append(Edge(int(match[1]), int(match[3]), match[2] == ">"))
    return tuple(edges)


def _integer(text: str, where: str) -> int:
    if not re.fullmatch(_N, text):
        few = " of at most 6 digits" if text.isdecimal() else ""
        raise ScheduleError(f"{where}: expected a number{few}, got {text!r:.80}")
    return int(text)
