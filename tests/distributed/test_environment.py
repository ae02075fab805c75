"""needle/distributed/environment.py: what launchers set, alone, within another, and damaged."""

from dataclasses import replace

import pytest
from harness import naming

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


AGENT = Place(3, 4, 1, 2, "torchrun", "10.0.0.1", 29501, "7c9.0")
MPI = Place(1, 2, 1, 2, "mpirun", "127.0.0.1", 64934, "prterun-vm-25743@1")  # all on one machine
TASK = Place(9, 12, 1, 4, "srun", "node002", 61440 + 3, "slurm.8195.2.0")
KUBEFLOW = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
DAEMON = SRUN | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
PLACES = [  # variables, those that differ, where the rank is then
    (TORCHRUN, {}, AGENT),
    (TORCHRUN, {"TORCHELASTIC_USE_AGENT_STORE": "False"}, replace(AGENT, port=29500)),
    (TORCHRUN, {"MASTER_PORT": "65535"}, replace(AGENT, port=65534)),
    (TORCHRUN, {"NEEDLE_LAUNCH": "f"}, replace(AGENT, launcher="needle", port=29500, job="f")),
    (TORCHRUN, {"NEEDLE_RANKS_KEY": "k" * 16}, replace(AGENT, key="k" * 16)),
    (KUBEFLOW, {}, Place(3, 4, 0, 1, "torchrun", "10.0.0.1", 29500)),  # one a machine
    (OPEN_MPI, {}, MPI),
    (OPEN_MPI, {"PMIX_NAMESPACE": "-1"}, replace(MPI, port=63530, job="-1")),
    (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "8"}, replace(MPI, size=8, host=None, port=None)),
    (OPEN_MPI, {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, replace(MPI, host="a", port=1)),
    (HYDRA, {}, Place(2, 3, 0, 1, "mpirun")),
    (SRUN, {}, TASK),
    (SRUN, {"SLURM_RESTART_COUNT": "1"}, replace(TASK, job="slurm.8195.2.1")),
    (SRUN, {"MASTER_ADDR": "a"}, TASK),
    (SRUN, {"MASTER_PORT": "1"}, TASK),
    (SRUN, {"MASTER_ADDR": "", "MASTER_PORT": "1"}, TASK),
    (SRUN, {"PMI_RANK": "9", "PMI_SIZE": "12", "PMIX_RANK": "9"}, TASK),
    # Launchers within another: the innermost knows the ranks.
    (DAEMON, OPEN_MPI, MPI),
    (DAEMON, HYDRA, Place(2, 3, 0, 1, "mpirun")),
    (DAEMON, TORCHRUN, AGENT),
    (DAEMON | OPEN_MPI, TORCHRUN, AGENT),
    # Processes that are no ranks.
    ({}, {}, None),
    ({}, {"MASTER_ADDR": "x", "HOME": "/"}, None),
    ({}, {"PET_NNODES": "1:1"}, None),  # one machine
    ({}, {"PET_NNODES": "1"}, None),
    (BATCH, {}, None),  # runs once
    (SRUN, {"SLURM_STEP_ID": str(0xFFFFFFFA)}, None),  # salloc's shell
    (SRUN, {"SLURM_STEP_ID": str(0xFFFFFFFB)}, None),  # the batch script of newer versions
]


def test_each_launcher_says_where_a_rank_is():
    for environ, change, place in PLACES:
        with naming(environ, change):
            assert find(environ | change) == place
    assert find(OPEN_MPI).is_local and not find(TORCHRUN).is_local
    for nodes, host in (
        ("node[001-0015],host2", "node001"),
        ("node[7,009-011],host2", "node7"),
        ("a-b.c[12]", "a-b.c12"),
        ("rack[3-4]n[08-16],x", "rack3n08"),
    ):
        assert first_host(nodes) == host


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
        (SRUN, {"NEEDLE_RANKS_KEY": "k" * 15}, ["NEEDLE_RANKS_KEY has 15 characters"]),
        ({}, {"PET_NNODES": "2"}, ["PET_NNODES=2", "torchrun PROGRAM"]),
    ],
)
def test_contradictions_are_refused(environ, change, words):
    changed = {k: v for k, v in (environ | change).items() if v is not None}
    with pytest.raises(ValueError) as raised:
        find(changed)
    for word in words:
        assert word in str(raised.value), str(raised.value)
