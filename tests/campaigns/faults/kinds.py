"""The kinds of faults: what happens to whom under which launcher, and what must become of the run."""

from __future__ import annotations

import resource
import signal
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from campaigns.faults import acts, damage
from campaigns.faults.acts import (
    Act,
    after,
    in_model,
    limit,
    paused,
    to_all,
    to_all_workers,
    to_helper,
    to_host,
    to_launcher,
    to_worker,
)
from campaigns.faults.damage import Damage, of_all, of_file, of_newest
from campaigns.faults.job import HOSTS, LOCAL, RANKS

When = Literal["start", "steady", "saving", "ending"]
Then = Literal["same", "resume", "restart", "gone"]
_ANY: tuple[When, ...] = ("start", "steady", "steady", "saving", "ending")
_STEADY: tuple[When, ...] = ("steady", "steady", "saving")


@dataclass(frozen=True)
class End:
    """How a job must end.

    Attributes:
        codes: exit codes, one of which every launcher must have.
        says: a regular expression that what it prints must match; {rank} and {number} are filled in.
        then: the final weights are there already (same); or after --resume; or after --resume, which must be refused
            with `refused`, and --restart; or there is nothing to resume (gone).
        survivors: whether the report has a line of every worker that says what it was doing.
        stalls: whether peers must wait for `timeout`.
        noise: a regular expression of tracebacks of other programs, which it may print.
    """

    codes: tuple[int, ...]
    says: str = ""
    then: Then = "resume"
    refused: str = ""
    survivors: bool = False
    stalls: bool = False
    noise: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: what happens, to whom.
        act: that happens while the job runs.
        damage: that happens to its files once it has been interrupted, instead.
        restarts: of the job.
        unclean: whether the launcher itself dies, and cannot remove its temporary files.
        under: what a shell does before it becomes the launcher, instead of a fault: limits, folders, outputs.
    """

    name: str
    end: End
    act: Act | None = None
    damage: Damage | None = None
    launcher: str = LOCAL
    when: tuple[When, ...] = _ANY
    restarts: int = 0
    unclean: bool = False
    under: str = ""

    @property
    def group(self) -> str:
        """What it is about, for the summary."""
        return self.name.partition(":")[0]

    @property
    def drains(self) -> bool:
        """Whether workers may drain the pipeline and save before they end; those of an agent that is killed go on."""
        asked = 0 in self.end.codes or (self.unclean and self.launcher == HOSTS)
        return self.damage is not None or (asked and self.end.then == "resume")


_NO_MATTER = End((0,), then="same")
_DRAINS = End((0,))
_FATAL = [
    number
    for number in sorted(signal.valid_signals())
    if number not in {1, 2, 13, 15, 17, 18, 19, 20, 21, 22, 23, 25, 28} and number <= 34  # HUP INT PIPE TERM ... WINCH
]
_HARMLESS = (
    signal.SIGINT,
    signal.SIGPIPE,
    signal.SIGCHLD,
    signal.SIGURG,
    signal.SIGXFSZ,
    signal.SIGWINCH,
    signal.SIGCONT,
)
_RAISED = r"error: worker {rank} failed with exit code 1: ZeroDivisionError: planted in a model"
_HUNG = r"meanwhile rank {rank}, stage [\d.]+, (F|Fe|B|R)\d+ \(batch \d+\) had been running for"
_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _name(number: int) -> str:
    return number.name if isinstance(number, signal.Signals) else signal.Signals(number).name


def _of_workers() -> list[Kind]:
    stalls = End((1,), r"error: worker {rank} is stalled or dead", survivors=True, stalls=True)
    found = [
        Kind(
            f"worker: {_name(n)}",
            End((1,), rf"error: worker {{rank}} failed with exit code -{int(n)}: Signal {int(n)} ", survivors=True),
            to_worker(n),
        )
        for n in _FATAL
    ]
    ended = End((1,), r"error: worker {rank} failed", survivors=True)
    found += [Kind(f"worker: {_name(n)}", ended, to_worker(n)) for n in (signal.SIGTERM, signal.SIGHUP)]
    found += [Kind(f"worker: {_name(n)}", _NO_MATTER, to_worker(n)) for n in _HARMLESS]
    found += [Kind(f"worker: {_name(n)}", stalls, to_worker(n)) for n in _STOPPING]
    again = End((0,), r"a worker has failed; all workers are restarted", then="same")
    found += [
        Kind(f"worker, restarts: {_name(n)}", again, to_worker(n), restarts=2)
        for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
    ]
    killed = to_worker(signal.SIGKILL)
    twice = after(killed, killed, 0.0, 4.0)  # the second one may come while all start again
    return [
        *found,
        Kind("worker, restarts: SIGKILL twice", again, twice, restarts=3),
        Kind("model: a worker raises", End((1,), _RAISED), in_model("fails"), when=_STEADY),
        Kind("model: a worker hangs", End((1,), _HUNG, stalls=True), in_model("hangs"), when=_STEADY),
        Kind("worker: paused", _NO_MATTER, paused(to_worker, 0.2, 2.0)),
        Kind("worker: all of them SIGKILL", End((1,), r"error: worker \d+ failed"), to_all_workers(signal.SIGKILL)),
    ]


def _of_launchers() -> list[Kind]:
    found = [Kind(f"launcher: {_name(n)}", _DRAINS, to_launcher(n)) for n in _ASKING]
    for n in (signal.SIGKILL, signal.SIGQUIT, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1, signal.SIGALRM):
        found.append(Kind(f"launcher: {_name(n)}", End((-n,)), to_launcher(n), unclean=True))
    for n in (signal.SIGPIPE, signal.SIGWINCH, signal.SIGCHLD, signal.SIGURG, signal.SIGCONT):
        found.append(Kind(f"launcher: {_name(n)}", _NO_MATTER, to_launcher(n)))
    for n in (signal.SIGINT, signal.SIGTERM):
        at_once = after(to_launcher(n), to_launcher(n), 0.05, 0.3)
        found.append(Kind(f"launcher: {_name(n)} twice", End((0, 128 + n)), at_once))
    hung_up = after(to_launcher(signal.SIGHUP), to_launcher(signal.SIGHUP), 0.0, 0.2)
    chased = after(to_launcher(signal.SIGTERM), to_worker(signal.SIGKILL), 0.0, 0.5)
    failed = End((1,), r"error: worker \d+ (failed|is stalled)")
    # Python starts another tracker, which has never heard of the semaphores that it is then told to forget.
    forgetful = replace(_NO_MATTER, noise=r"Traceback.*\n(  .*resource_tracker\.py.*\n(    .*\n)*)+KeyError: '/mp-\w+'")
    return [
        *found,
        Kind("launcher: SIGHUP twice", _DRAINS, hung_up),
        Kind("launcher: paused", _NO_MATTER, paused(to_launcher, 0.2, 2.0)),
        Kind("launcher: SIGTERM, then a worker SIGKILL", End((0, 1)), chased),
        Kind("everybody: SIGTERM", _DRAINS, to_all(signal.SIGTERM)),
        Kind("everybody: SIGHUP", _DRAINS, to_all(signal.SIGHUP)),
        Kind("everybody: paused", _NO_MATTER, paused(to_all, 0.2, 2.0)),
        Kind("fork server: SIGKILL", failed, to_helper("forkserver", signal.SIGKILL)),
        Kind("fork server: SIGTERM", _NO_MATTER, to_helper("forkserver", signal.SIGTERM)),
        Kind("fork server: paused", _NO_MATTER, paused(partial(to_helper, "forkserver"), 0.2, 2.0)),
        Kind("resource tracker: SIGKILL", forgetful, to_helper("resource_tracker", signal.SIGKILL)),
    ]


def _of_hosts() -> list[Kind]:
    again, kill = End((0,), then="same"), signal.SIGKILL
    on_hosts = partial(Kind, launcher=HOSTS)
    gives_up, saved = End((1, -kill), r"exitcode +: -?\d+|Error"), End((0, 1), "")
    lost = End((1, -kill), "")
    return [
        on_hosts("hosts, restarts: worker SIGKILL", again, to_worker(kill), restarts=3, when=_STEADY),
        on_hosts("hosts, restarts: worker SIGSEGV", again, to_worker(signal.SIGSEGV), restarts=3, when=_STEADY),
        on_hosts("hosts: worker SIGKILL", gives_up, to_worker(kill), when=_STEADY),
        on_hosts("hosts: worker SIGTERM", saved, to_worker(signal.SIGTERM), when=_STEADY),
        on_hosts("hosts: worker paused", again, paused(to_worker, 0.2, 2.0)),
        *(on_hosts(f"hosts: agent {_name(n)}", saved, to_launcher(n), when=_STEADY) for n in (15, 2, 1)),
        on_hosts("hosts: agent SIGKILL", lost, to_launcher(kill), when=_STEADY, unclean=True),
        on_hosts("hosts: one of them SIGKILL", lost, to_host(kill), when=_STEADY, unclean=True),
        on_hosts("hosts: one of them paused", again, paused(to_host, 0.2, 2.0), when=_STEADY),
        Kind("ranks: SIGKILL", End((1, -kill), r"lane .* broke|dead or stalled|did not come"), to_worker(kill),
             launcher=RANKS, when=_STEADY, unclean=True),
        Kind("ranks: SIGTERM", _DRAINS, to_worker(signal.SIGTERM), launcher=RANKS, when=_STEADY),
        Kind("ranks: SIGINT", _DRAINS, to_worker(signal.SIGINT), launcher=RANKS, when=_STEADY),
        Kind("ranks: paused", _NO_MATTER, paused(to_worker, 0.2, 2.0), launcher=RANKS, when=_STEADY),
    ]  # fmt: skip


def _of_disks() -> list[Kind]:
    size, files = resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
    for_good = limit(size, 0)
    return [
        Kind("disk: full for good", End((1,), r"File too large"), for_good, when=_STEADY),
        Kind("disk: full for a while", End((0, 1)), after(for_good, limit(size, -1), 0.05, 0.3), when=_STEADY),
        Kind("disk: no more open files for a while", End((0, 1)), after(limit(files, 8), limit(files, -1), 0.05, 0.3),
             when=_STEADY),
        Kind("disk: the folder of checkpoints is blocked", End((3,), r"not written", then="same"),
             acts.checkpoints_blocked, when=_STEADY),
        *(Kind(f"disk: the folder of checkpoints is blocked, {launcher}",
               End((code,), r"none of its checkpoints could be written", then="same"), acts.checkpoints_blocked,
               launcher=launcher, when=_STEADY) for launcher, code in ((HOSTS, 1), (RANKS, 3))),
        Kind("disk: the record is removed", _NO_MATTER, acts.metrics_removed, when=_STEADY),
        Kind("disk: the run folder is removed", End((1, 2, 3), r"(?i)error: .*{folder}", then="gone"),
             acts.folder_removed, when=_STEADY),
    ]  # fmt: skip


def _of_files() -> list[Kind]:
    older = End((0,), r"a damaged checkpoint was passed over", then="same")
    config = "config.yaml"
    refused = End((2,), config, then="restart", refused=r"error: .*config\.yaml")
    none_left = End((1, 2), "checkpoint", then="restart", refused=r"error: .*checkpoint")
    changes = (
        damage.flip, damage.cut, damage.empty, damage.garbage, damage.grown, damage.linked, damage.folder_instead,
        damage.remove,
    )  # fmt: skip
    return [
        *(
            Kind(f"files: {name} of the newest checkpoint, {change.__name__}", older, damage=of_newest(change, name))
            for name in ("stage", "index")
            for change in changes
        ),
        *(
            Kind(f"files: every checkpoint, {c.__name__}", none_left, damage=of_all(c))
            for c in (damage.flip, damage.remove)
        ),
        Kind("files: checkpoints removed", none_left, damage=damage.all_removed),
        Kind("files: the newest checkpoint is half of one", _NO_MATTER, damage=damage.newest_unfinished),
        Kind("files: others among the checkpoints", _NO_MATTER, damage=damage.junk_beside),
        *(
            Kind(f"files: the record, {c.__name__}", _NO_MATTER, damage=of_file(c, "metrics.jsonl"))
            for c in (damage.cut, damage.garbage, damage.grown, damage.remove, damage.empty)
        ),
        Kind("files: .config.yaml, remove", _NO_MATTER, damage=of_file(damage.remove, ".config.yaml")),
        *(
            Kind(f"files: config.yaml, {c.__name__}", refused, damage=of_file(c, config))
            for c in (damage.cut, damage.empty)
        ),
    ]


def _of_surroundings() -> list[Kind]:
    def refused(says: str) -> End:
        return End((2,), rf"^error: .*{says}.*\n$", then="gone")

    no_memory = End(
        (1,), r"(?m)^error: (a module cannot|Python has failed|worker \d+ failed|there is no memory left)", then="gone"
    )
    found = {
        "few files": ("ulimit -n 24", refused("may open 24 files here")),
        "the working folder is gone": (
            'mkdir "$TMPDIR/x"; cd "$TMPDIR/x"; rmdir "$TMPDIR/x"',
            refused("has been removed"),
        ),
        "an interface of no machine": ("export GLOO_SOCKET_IFNAME=nope0", refused("'nope0'")),
        **{
            f"a long name, {option}": (f'set -- "$@" {option}$(printf %0300d 0)', refused("File name too long"))
            for option in ("--set out=", "--data ", "--config ")
        },
        **{f"memory, {kib} KiB": (f"ulimit -v {kib}", no_memory) for kib in (400_000, 700_000, 800_000)},
        "outputs closed": ("exec >&- 2>&-", _NO_MATTER),
        "outputs full": ("exec >/dev/full 2>&1", _NO_MATTER),
        "outputs in ASCII": ("export PYTHONIOENCODING=ascii", _NO_MATTER),
    }
    return [
        Kind(f"surroundings: {name}", end, when=("start",), under=under, unclean="memory" in name)
        for name, (under, end) in found.items()
    ]


KINDS = (*_of_workers(), *_of_launchers(), *_of_hosts(), *_of_disks(), *_of_files(), *_of_surroundings())
"""All kinds of faults."""


def kind_named(name: str) -> Kind:
    """The kind of a name."""
    (found,) = [kind for kind in KINDS if kind.name == name]
    return found
