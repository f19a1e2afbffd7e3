"""A process's place in a job, from the environment variables of its launcher.

The contract of torch is RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, with LOCAL_RANK and LOCAL_WORLD_SIZE for the
processes of one machine; torchrun, Ray and the operators of Kubernetes set it. What srun, Open MPI and the launchers of
the PMI family (MPICH, Intel MPI) set instead is translated. docs/launchers.md has a section for each.
"""

from __future__ import annotations

import os
import re
import signal
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_PORTS = range(20_000, 30_000)  # below those that Linux gives to connections
LOOPBACK = "127.0.0.1"
_DIGITS = 9  # of a number of processes
_CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_VARIABLES = {
    "mpirun": tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
"""Where the numbers of a place stand: rank, size, local rank and local size."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of Slurm, such as 2(x3),1
_MARK = b"TORCHELASTIC_RUN_ID="


@dataclass(frozen=True)
class JobPlace:
    """One process's place in a job.

    Attributes:
        launcher: what has started it, for messages.
        rank, size: of the job.
        address, port: where the store of the job listens.
        local_rank, local_size: among the processes of this machine; None if the launcher does not say.
        served: an agent serves the store; otherwise rank 0 does.
    """

    launcher: str
    rank: int
    size: int
    address: str
    port: int
    local_rank: int | None = None
    local_size: int | None = None
    served: bool = False


def job_place(environment: Mapping[str, str]) -> JobPlace | None:
    """Return the place of this process in a job that has been started for it; None if there is none.

    A launcher that starts a single process has not started a job, except torchrun, which says what it means.

    Args:
        environment: the variables of this process.

    Raises:
        ConfigError: some of the variables are missing, no numbers, or contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        found: JobPlace | None = _by_contract(environment)
    elif "OMPI_COMM_WORLD_SIZE" in environment:
        job = _first_set(environment, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
        found = _by_mpi(environment, "mpirun", job)
    elif "PMI_SIZE" in environment and "MPI_LOCALNRANKS" in environment:
        found = _by_mpi(environment, "mpiexec", "")
    elif "SLURM_PROCID" in environment:
        found = _by_slurm(environment)
    else:
        return None
    if found is None:
        return None
    _check(found)
    return None if found.size == 1 and not found.served else found


def _check(place: JobPlace) -> None:
    """Refuse a place of which the numbers contradict each other, as where a variable of another job is left over.

    Raises:
        ConfigError: which two of them do.
    """
    rank, size, local_rank, local_size = _VARIABLES.get(place.launcher, _CONTRACT)
    here = (size, place.size) if place.local_size is None else (local_size, place.local_size)
    for number, value, count, total in ((rank, place.rank, size, place.size), (local_rank, place.local_rank, *here)):
        if value is not None and value >= total:
            raise ConfigError(
                f"{place.launcher} has set {number} to {value}, but {count} to {total}; numbers begin at 0 and are "
                "below that. Is one of both left over from another job?"
            )
    if place.local_size is not None and place.local_size > place.size:
        raise ConfigError(
            f"{place.launcher} has set {local_size} to {place.local_size}, but {size} to {place.size}; a machine has "
            "no more processes than the job. Is one of both left over from another job?"
        )


def _by_contract(environment: Mapping[str, str]) -> JobPlace:
    """The place according to the variables of torch's env:// rendezvous."""
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "the launcher"
    size = _number(environment, "WORLD_SIZE")
    alone = launcher == "the launcher" and size == 1
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing and not alone:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, so this process is one of a job of {size}, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not. Set MASTER_ADDR to an address of rank 0's machine and "
            "MASTER_PORT to a free port there, or unset RANK and WORLD_SIZE to start a job on this machine"
        )
    return JobPlace(
        launcher,
        _number(environment, "RANK"),
        size,
        environment.get("MASTER_ADDR", LOOPBACK),
        0 if missing else _port(environment),
        _maybe(environment, "LOCAL_RANK"),
        _maybe(environment, "LOCAL_WORLD_SIZE"),
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _by_mpi(environment: Mapping[str, str], launcher: str, job: str) -> JobPlace:
    """The place according to a launcher of MPI; `job` as of `_meeting`."""
    rank, size, local_rank, local_size = _VARIABLES[launcher]
    count, here = _number(environment, size), _number(environment, local_size)
    address, port = _meeting(environment, launcher, job, LOOPBACK if here == count else None)
    number = _number(environment, rank)
    return JobPlace(launcher, number, count, address, port, _maybe(environment, local_rank), here)


def _by_slurm(environment: Mapping[str, str]) -> JobPlace | None:
    """The place according to srun; None in a batch script, which is no task of a step."""
    size = _maybe(environment, "SLURM_STEP_NUM_TASKS")
    if size is None:
        size = _maybe(environment, "SLURM_NTASKS")
    if size is None or size == 1:
        return None
    nodes = _maybe(environment, "SLURM_STEP_NUM_NODES") or _maybe(environment, "SLURM_NNODES")
    hosts = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    first = LOOPBACK if nodes == 1 or not hosts else _first_host(hosts)
    job, step = (_first_set(environment, f"SLURM_{of}_ID", f"SLURM_{of}ID") for of in ("JOB", "STEP"))
    address, port = _meeting(environment, "srun", f"{job}.{step}", first)
    local = _tasks_on_node(environment)
    if local is None and nodes == 1:
        local = size
    rank = _number(environment, "SLURM_PROCID")
    return JobPlace("srun", rank, size, address, port, _maybe(environment, "SLURM_LOCALID"), local)


def _first_host(hosts: str) -> str:
    """Return the first host of a list such as `node[03-10,12],gpu7`.

    Raises:
        ConfigError: it is no such list.
    """
    first = re.match(r"[^,\[\]]*(\[[^\]]*\][^,\[\]]*)*", hosts)
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"cannot read the list of nodes that Slurm gives, {hosts!r}; set MASTER_ADDR")
    return name


def _tasks_on_node(environment: Mapping[str, str]) -> int | None:
    """Return how many tasks of the step run on this node; None if Slurm does not say so.

    Slurm writes `2(x3),1` for two tasks on each of three nodes and one on the fourth.
    """
    text = _first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = [int(count) for count, times in _TASKS.findall(text) for _ in range(min(int(times or 1), 1 << 20))]
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def _meeting(environment: Mapping[str, str], launcher: str, job: str, first: str | None) -> tuple[str, int]:
    """Return address and port of the store, where the launcher says neither.

    Args:
        job: a text that all processes of the job have, and no other job, if possible.
        first: the machine of rank 0, if that is known.

    Raises:
        ConfigError: it is not, and the user has not said it.
    """
    address = environment.get("MASTER_ADDR") or first
    if address is None:
        raise ConfigError(
            f"{launcher} has started this job on several machines, but does not say which one has rank 0; set "
            "MASTER_ADDR to its address and MASTER_PORT to a free port there, for all processes (mpirun -x MASTER_ADDR "
            "-x MASTER_PORT, mpiexec -genv)"
        )
    if environment.get("MASTER_PORT"):
        return address, _port(environment)
    return address, _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _number(environment: Mapping[str, str], name: str) -> int:
    """Return the number in a variable.

    Raises:
        ConfigError: it is not set, or holds none.
    """
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"the environment variable {name} must be a whole number from 0 on, got {text!r:.80}")
    if len(text) > _DIGITS:
        raise ConfigError(f"the environment variable {name} must have {_DIGITS} digits at most, got {text!r:.80}")
    return int(text)


def _port(environment: Mapping[str, str]) -> int:
    """Return the port of the store, which all processes must know: none may be chosen by the system.

    Raises:
        ConfigError: there is no such port.
    """
    port = _number(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"the environment variable MASTER_PORT must be from 1 to 65535, got {port}")
    return port


def _maybe(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable; None if it is not set."""
    return _number(environment, name) if environment.get(name) else None


def _first_set(environment: Mapping[str, str], *names: str) -> str:
    """Return the first of these variables that is set; empty if none is."""
    return next((environment[name] for name in names if environment.get(name)), "")


class Agent:
    """The torchrun of this machine, which has started this worker.

    Make it when the worker starts: once the agent has died, it is no ancestor of this process any more.

    Args:
        environment: the variables of this process.

    Attributes:
        starts_again: whether it would start all workers again if this one failed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        count, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        self.starts_again = count.isdecimal() and most.isdecimal() and int(count) < int(most)
        place = job_place(environment)
        serves = place is not None and place.launcher == "torchrun"
        self._process = _nearest_ancestor_outside() if serves else None
        self._begun = None if self._process is None else _begun(self._process)
        self._ends = place is not None and not place.local_rank and place.local_size not in (None, place.size)

    @property
    def is_gone(self) -> bool:
        """Whether there was an agent that has died, so that this worker is an orphan; False where nothing can tell."""
        return self._begun is not None and _begun(self._process or 0) != self._begun

    def end(self) -> None:
        """Ask it to end; does nothing unless torchrun has started a job on several machines.

        The first worker of a machine does it. An agent that is ending already is not harmed.
        """
        if self._process is None or not self._ends or self.is_gone:
            return
        with suppress(OSError):
            os.kill(self._process, signal.SIGTERM)


def _nearest_ancestor_outside() -> int:
    """Return the process id of the agent: the nearest ancestor that was not itself started by one.

    Between it and this process may be shells.
    """
    process = os.getppid()
    with suppress(OSError, IndexError, ValueError):  # there is no /proc, or it is another user's
        while _MARK in Path(f"/proc/{process}/environ").read_bytes():
            process = int(_fields(process)[1])
    return process


def _begun(process: int) -> str | None:
    """Return the time when a process was started, which tells it from a later one of its number; None if it is dead."""
    try:
        fields = _fields(process)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _fields(process: int) -> list[str]:
    """Return what the system says of a process after its name: its state, its parent, and so on (proc(5))."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
