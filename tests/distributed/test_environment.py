"""needle/distributed/environment.py: what launchers set, alone, within another, and damaged."""

import pytest

from needle.distributed.environment import Place, find, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "7c9",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-25743@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
BATCH = {  # a command in an sbatch script
    "SLURM_JOB_ID": "8195",
    "SLURM_NTASKS": "12",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "8,4",
    "SLURM_JOB_NODELIST": "node[001-004,7],other",
}
SRUN = BATCH | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),4,2",
    "SLURM_STEP_NODELIST": "node[002-005]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_process_without_a_launcher():
    assert find({}) is None and find({"MASTER_ADDR": "x", "HOME": "/"}) is None
    assert find({"PET_NNODES": "1:1"}) is find({"PET_NNODES": "1"}) is None  # one machine
    assert find(BATCH) is None  # runs once
    for own in (0xFFFFFFFA, 0xFFFFFFFB):  # salloc's shell, the batch script of newer versions
        assert find(SRUN | {"SLURM_STEP_ID": str(own)}) is None


def test_torchrun():
    assert find(TORCHRUN) == Place(3, 4, 1, 2, "torchrun", "10.0.0.1", 29501, "7c9.0")
    static = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert find(static).port == 29500  # no process listens there yet
    assert find(TORCHRUN | {"MASTER_PORT": "65535"}).port == 65534
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of Kubeflow: one a machine
    place = find({name: TORCHRUN[name] for name in names})
    assert place == Place(3, 4, 0, 1, "torchrun", "10.0.0.1", 29500)
    place = find({**TORCHRUN, "NEEDLE_LAUNCH": "f00"})
    assert place == Place(3, 4, 1, 2, "needle", "10.0.0.1", 29500, "f00")


def test_the_key_of_a_start():
    keyed = find(TORCHRUN | {"NEEDLE_RANKS_KEY": "k" * 16})
    assert keyed.key == "k" * 16 and keyed.rank == 3 and not keyed.is_local
    assert find(OPEN_MPI).key == "" and find(OPEN_MPI).is_local
    with pytest.raises(ValueError, match="NEEDLE_RANKS_KEY has 15 characters"):
        find(SRUN | {"NEEDLE_RANKS_KEY": "k" * 15})


def test_mpirun():
    place = find(OPEN_MPI)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert place.launcher == "mpirun" and place.job == "prterun-vm-25743@1"
    assert place.host == "127.0.0.1" and 61440 <= place.port <= 65535  # all on one machine
    assert find(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-vm-25744@1"}).port != place.port
    spread = find(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "8"})
    assert spread.host is spread.port is None
    told = find(OPEN_MPI | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert (told.host, told.port) == ("a", 1)
    assert find(HYDRA) == Place(2, 3, 0, 1, "mpirun")


def test_srun():
    place = find(SRUN)
    assert place == Place(9, 12, 1, 4, "srun", "node002", 61440 + 3, "slurm.8195.2.0")
    assert find(SRUN | {"SLURM_RESTART_COUNT": "1"}).job != place.job
    for half in {"MASTER_ADDR": "a"}, {"MASTER_PORT": "1"}, {"MASTER_ADDR": "", "MASTER_PORT": "1"}:
        assert find(SRUN | half) == place
    assert find(SRUN | {"PMI_RANK": "9", "PMI_SIZE": "12", "PMIX_RANK": "9"}) == place
    for nodes, host in (
        ("node[001-0015],host2", "node001"),
        ("node[7,009-011],host2", "node7"),
        ("a-b.c[12]", "a-b.c12"),
        ("rack[3-4]n[08-16],x", "rack3n08"),
    ):
        assert first_host(nodes) == host


def test_the_innermost_launcher_knows_the_ranks():
    daemon = {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
    assert find(daemon | OPEN_MPI).launcher == "mpirun"
    assert find(daemon | HYDRA) == find(HYDRA)
    assert find(daemon | TORCHRUN) == find(daemon | OPEN_MPI | TORCHRUN) == find(TORCHRUN)


@pytest.mark.parametrize(
    "environ, change, words",
    [
        (TORCHRUN, {"WORLD_SIZE": "2"}, ["RANK=3", "WORLD_SIZE=2"]),
        (TORCHRUN, {"RANK": "²"}, ["whole number"]),
        (TORCHRUN, {"MASTER_PORT": "http"}, ["MASTER_PORT='http'", "whole number"]),
        (OPEN_MPI, {"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "to 65535"]),
        (TORCHRUN, {"MASTER_PORT": "0"}, ["MASTER_PORT=0", "from 1 to"]),
        (TORCHRUN, {"RANK": None}, ["WORLD_SIZE=4", "RANK is not set"]),
        (TORCHRUN, {"LOCAL_RANK": None}, ["RANK=3", "LOCAL_RANK is not set"]),
        (TORCHRUN, {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2"}, ["OMPI_COMM_WORLD_RANK=2"]),
        (HYDRA, {"MPI_LOCALRANKID": None, "MPI_LOCALNRANKS": None}, ["PMI_RANK=2", "rest"]),
        (SRUN, {"SLURM_STEP_TASKS_PER_NODE": None}, ["SLURM_STEP_TASKS_PER_NODE is not set"]),
        (SRUN, {"SLURM_STEP_NODELIST": None}, ["SLURM_STEP_NODELIST is not set", "srun sets"]),
        (SRUN, {"SLURM_PROCID": "12"}, ["SLURM_PROCID=12", "SLURM_STEP_NUM_TASKS=12"]),
        (SRUN, {"SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4", "SLURM_STEP_TASKS_PER_NODE=4"]),
        ({}, {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
        ({}, {"PMIX_RANK": "1"}, ["PMIX_RANK=1", "LOCAL_RANK"]),
        ({}, {"PET_NNODES": "2"}, ["PET_NNODES=2", "torchrun PROGRAM"]),
    ],
)
def test_contradictions_are_refused(environ, change, words):
    changed = {k: v for k, v in (environ | change).items() if v is not None}
    with pytest.raises(ValueError) as raised:
        find(changed)
    for word in words:
        assert word in str(raised.value), str(raised.value)
