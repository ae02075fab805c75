"""Collectives of ranks that are right, wrong, killed, stopped and without a GPU."""

import os
import socket
import subprocess
import sys

import pytest
from harness import OPEN_MPI, ROOT, naming, shared_library
from struck_runs import missing
from struck_runs import mpirun as mpirun_words

from needle.testing import OPS

pytestmark = pytest.mark.slow

with_mpi = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def mpirun(machine):
    """mpirun(size, fault) -> (exit code, lines) of ranks on the CPU."""

    def diagnose(size: int, fault: str = ""):
        under = *mpirun_words(), "-n", size
        more = {"FAULT": fault, "FAKE_GPUS": "0", "LD_LIBRARY_PATH": "", "SMI": '{"gpu": []}'}
        done = machine.diagnose(under=under, **OPEN_MPI, **more)
        return done.returncode, done.stdout.splitlines()

    return diagnose


@with_mpi
def test_ranks_that_are_right_say_so(mpirun):
    code, lines = mpirun(2)
    assert code == 0, lines
    for rank in 0, 1:
        assert f"rank 0 of 2: rank {rank}         {os.uname().nodename}, cpu()" in lines
        for check in "all_gather", "reduce_scatter":
            said = f"ranks          ok: {check} of 2 ranks agrees with NumPy"
            assert f"rank {rank} of 2: {said}" in lines
    assert len([line for line in lines if ": needle         " in line]) == 1


@with_mpi
@pytest.mark.parametrize(
    "fault, said",
    [
        ("send 1 1", "all_gather: rank 0 has other numbers than rank 1 sent"),
        ("add 1 2", "reduce_scatter: the sum of rank 1 is wrong"),
    ],
)
def test_wrong_rank_is_named_by_all(mpirun, fault, said):
    code, lines = mpirun(3, fault)
    assert code == 1
    for rank in range(3):
        failed = f"rank {rank} of 3: ranks          FAILED: {said}"
        assert any(line.startswith(failed) for line in lines), lines


@with_mpi
@pytest.mark.parametrize("what", ["die", "stop"])
def test_rank_that_dies_or_hangs_is_named_within_the_deadline(mpirun, what):
    code, lines = mpirun(2, f"{what} 1 2")
    own = [line for line in lines if line.startswith("rank 0 of 2: ") and "reduce_scatter" in line]
    assert code != 0 and any("FAILED: " in line for line in own), lines
    assert any("rank 1" in line for line in own), lines


def test_each_rank_of_torchrun_examines_its_own_gpu(machine, tmp_path):
    """With a fake NCCL."""
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    for package in "nvidia", "nvidia/nccl":  # stands before an installed one
        (tmp_path / package / "__init__.py").touch()
    source = f'#include "{ROOT}/tests/distributed/fake_nccl.c"'
    shared_library(source, tmp_path / "nvidia/nccl/lib/libnccl.so.2")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = machine.environment(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=port)
    shared |= {"MASTER_ADDR": "127.0.0.1", "TMPDIR": str(tmp_path)}
    shared["PYTHONPATH"] += f":{tmp_path}"
    own = lambda rank: os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    words = {"args": [sys.executable, "-m", "needle.diagnose"], "cwd": machine.folder, "text": True}
    ranks = [subprocess.Popen(**words, env=own(n), stdout=subprocess.PIPE) for n in range(2)]
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=200)
        own, other = ("cuda()", "cuda(1)")[:: -1 if rank else 1]
        with naming(said):
            assert process.returncode == 0
            assert f"rank {rank} of 2: {own:<14} ok: {len(OPS)} ops" in said
            assert f": {other:<14} ok" not in said and (": GPU 1 " in said) == (rank == 0)
            assert f"rank {rank} of 2: ranks          ok: reduce_scatter of 2 ranks" in said
