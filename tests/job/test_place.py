"""A process's place in a job, from what launchers set; and what is said where they set half of it."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.job.place import JobPlace, job_place

STORE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09],big1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_NAMESPACE": "prterun-host-1@1",
}  # fmt: skip
HERE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **STORE}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),  # as a machine for notebooks may have them
        ({"RANK": "3", "WORLD_SIZE": "4", **STORE}, JobPlace("the launcher", 3, 4, "10.0.0.1", 29500)),
        (
            HERE | STEP,
            JobPlace("the launcher", 3, 4, "10.0.0.1", 29500, 1, 2),
        ),
        (
            {
                "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
                **STORE,
            },
            JobPlace("torchrun", 0, 1, "10.0.0.1", 29500, served=True),
        ),
        (STEP | {"MASTER_PORT": "7000"}, JobPlace("srun", 2, 6, "gpu07", 7000, 0, 2)),
        (STEP | STORE | {"SLURM_NODEID": "3"}, JobPlace("srun", 2, 6, "10.0.0.1", 29500, 0, 1)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", **STORE}, JobPlace("srun", 1, 2, "10.0.0.1", 29500)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "77"}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}, None),  # a batch script
        (OPEN_MPI | {"MASTER_PORT": "7000"}, JobPlace("mpirun", 1, 2, "127.0.0.1", 7000, 1, 2)),
        (HYDRA | {"MASTER_PORT": "7000"}, JobPlace("mpiexec", 3, 4, "127.0.0.1", 7000, 3, 4)),
        # The daemons of mpirun are tasks of Slurm; their children are none.
        (STEP | OPEN_MPI | {"MASTER_PORT": "7000"}, JobPlace("mpirun", 1, 2, "127.0.0.1", 7000, 1, 2)),
    ],
)  # fmt: skip
def test_the_place_that_a_launcher_gives(environment: dict[str, str], place: JobPlace | None) -> None:
    assert job_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "MASTER_ADDR and MASTER_PORT are not. .* or unset RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, "but MASTER_PORT is not"),
        ({"RANK": "-1", "WORLD_SIZE": "4", **STORE}, "RANK must be a whole number from 0 on, got '-1'"),
        ({"RANK": "9" * 30, "WORLD_SIZE": "4", **STORE}, "RANK must have 9 digits at most, got '9999"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "9" * 11}, "OMPI_COMM_WORLD_SIZE must have 9 digits at most, got '9999"),
        ({"RANK": "0", "WORLD_SIZE": "4", **STORE, "MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, got 0"),
        (STEP | {"MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535, got 65536"),
        ({"RANK": "0", "WORLD_SIZE": "four", **STORE}, "WORLD_SIZE must be a whole number from 0 on, got 'four'"),
        (HERE | {"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a whole number from 0 on, got '-1'"),
        (HERE | {"LOCAL_WORLD_SIZE": "1.5"}, "LOCAL_WORLD_SIZE must be a whole number from 0 on, got '1.5'"),
        (HERE | {"RANK": "4"}, "the launcher has set RANK to 4, but WORLD_SIZE to 4; .* left over from another job"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK to 1, but WORLD_SIZE to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0", **STORE}, "RANK to 0, but WORLD_SIZE to 0"),
        (HERE | {"LOCAL_RANK": "5"}, "LOCAL_RANK to 5, but LOCAL_WORLD_SIZE to 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", **STORE}, "LOCAL_RANK to 2, but WORLD_SIZE to 2"),
        (HERE | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE to 8, but WORLD_SIZE to 4"),
        (HERE | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK to 1, but LOCAL_WORLD_SIZE to 0"),
        (HERE | {"TORCHELASTIC_RUN_ID": "x", "RANK": "9"}, "torchrun has set RANK to 9, but WORLD_SIZE to 4"),
        (HYDRA | {"MPI_LOCALRANKID": "4"}, "mpiexec has set MPI_LOCALRANKID to 4, but MPI_LOCALNRANKS to 4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK to 2, but OMPI_COMM_WORLD_SIZE to 2"),
        (STEP | STORE | {"SLURM_PROCID": "6"}, "SLURM_PROCID to 6, but SLURM_STEP_NUM_TASKS to 6"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "several machines, but does not say which one has rank 0"),
        (STEP | {"SLURM_STEP_NODELIST": "[;rm]"}, "cannot read the list of nodes"),
    ],
)
def test_half_a_place_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_place(environment)


def test_steps_and_jobs_of_one_machine_meet_at_ports_of_their_own() -> None:
    """All processes of one derive the same; and below the ports that systems give to connections."""
    changes = ({}, {"SLURM_PROCID": "5"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "78"})
    ports = [place.port for change in changes if (place := job_place(STEP | change))]
    assert ports[0] == ports[1]
    assert len(set(ports)) == 3
    assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu9", "gpu7"),
        ("node[03-10,12],gpu7", "node03"),
        ("a[1-2]n[4,5].site.org,x", "a1n4.site.org"),
    ],
)
def test_rank_0_is_on_the_first_node_of_a_step(hosts: str, first: str) -> None:
    place = job_place(STEP | {"SLURM_STEP_NODELIST": hosts})
    assert place is not None
    assert place.address == first


def test_the_tasks_of_each_node() -> None:
    step = STEP | {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    places = [job_place(step | {"SLURM_NODEID": str(node)}) for node in range(4)]
    assert [place and place.local_size for place in places] == [2, 2, 1, None]
