"""Find the rank of this process in the environment that its launcher has set.

    torchrun   RANK WORLD_SIZE, LOCAL_RANK LOCAL_WORLD_SIZE, MASTER_ADDR MASTER_PORT; the same of
               Kubeflow, of `needle.distributed.spawn`, and of a script of one's own
    mpirun     Open MPI's OMPI_COMM_WORLD_RANK and the like; Hydra's (MPICH, Intel MPI) PMI_RANK
               PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
    srun       SLURM_PROCID and the like, of a task of a step

Nested launchers leave several sets, and the innermost knows the ranks: torchrun's variables come
first, then mpirun's, whose daemons srun may have started, one a machine, then srun's.

A command in an sbatch script or in a shell of salloc has Slurm's variables too, but is no task: it
runs once, whatever --ntasks says, and is no rank.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Mapping

SHORTEST_KEY = 16  # characters
PORTS = 61440  # the first of 4096 ports for launchers that name none
# Slurm's own steps (batch script, salloc's shell, pending, external) count down from here.
FIRST_OWN_STEP = 0xFFFFFFF0


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank of a start. `host` and `port` say where rank 0 should be, `job` names the start; all
    three only if the environment says them."""

    rank: int
    size: int
    local_rank: int  # among those of this machine
    local_size: int
    launcher: str  # torchrun, mpirun, srun or needle
    host: str | None = None
    port: int | None = None
    job: str = ""
    key: str = dataclasses.field(default="", repr=False)  # a secret that all ranks have

    @property
    def is_local(self) -> bool:
        """True if all ranks are on this machine."""
        return self.local_size == self.size


def find(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process, or None if no launcher started it as a rank. ValueError
    names a variable that is missing, or contradicts another."""
    place = _torchrun(environ) or _mpirun(environ) or _srun(environ)
    if place is None:
        _refuse_traces(environ)
    key = environ.get("NEEDLE_RANKS_KEY", "")
    if 0 < len(key) < SHORTEST_KEY:
        raise ValueError(
            f"NEEDLE_RANKS_KEY has {len(key)} characters, and fewer than {SHORTEST_KEY} can be "
            "guessed: openssl rand -hex 32 prints one"
        )
    return place if place is None else dataclasses.replace(place, key=key)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as `node[001-004,7],other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else ""


# ---- the launchers, the innermost first ---------------------------------------------------------


def _torchrun(environ: Mapping[str, str]) -> Place | None:
    if not {"RANK", "LOCAL_RANK"} & environ.keys():
        return None
    # Kubeflow's PyTorchJob starts one process a machine and sets no LOCAL_.
    local = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    ranks = _ranks(environ, "torchrun", names if local else names[:2])
    host, port = _master(environ)
    if "NEEDLE_LAUNCH" in environ:
        return Place(*ranks, "needle", host, port, environ["NEEDLE_LAUNCH"])
    if port is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1 if port < 65535 else -1  # torchrun itself listens at the port that it names
    job = [environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
    return Place(*ranks, "torchrun", host, port, ".".join(job) if any(job) else "")


def _mpirun(environ: Mapping[str, str]) -> Place | None:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    if not {*names} & environ.keys():
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]  # of Hydra
        # Slurm's PMI plugins set PMI_RANK as well, but nothing local: that is srun's.
        if not {*names[2:]} & environ.keys():
            return None
    ranks, job = _ranks(environ, "mpirun", names), environ.get("PMIX_NAMESPACE", "")
    host, port = _master(environ)
    if host is None and ranks[1] == ranks[3]:  # all on one machine
        host, port = "127.0.0.1", PORTS + zlib.crc32(job.encode()) % 4096
    return Place(*ranks, "mpirun", host, port, job)


def _srun(environ: Mapping[str, str]) -> Place | None:
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return None
    names = ["SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NODEID"]
    step, job, node = _numbers(environ, "srun", names)
    if step >= FIRST_OWN_STEP:
        return None
    tasks, nodes = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"  # 8(x2),4 and node[1-3]
    _require(environ, "srun", [*names, tasks])
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ[tasks])
    counts = [count for count, times in runs for _ in range(int(times or 1))]
    names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", tasks]
    ranks = _ranks({**environ, tasks: counts[node]}, "srun", names)
    host, port = _master(environ)
    if host is None:
        _require(environ, "srun", [*names, nodes])
        host, port = first_host(environ[nodes]), PORTS + job % 4096
    start = f"slurm.{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return Place(*ranks, "srun", host, port, start)


def _refuse_traces(environ: Mapping[str, str]) -> None:
    """Raise ValueError if a launcher has set variables without a rank: this process alone would
    train the same model as each of the others."""
    if environ.get("PET_NNODES", "1") not in ("1", "1:1"):
        raise ValueError(
            f"PET_NNODES={environ['PET_NNODES']}, but RANK is not set: these variables are for "
            "torchrun, so that the command must be `torchrun PROGRAM`, not `python PROGRAM`"
        )
    for name in ("WORLD_SIZE", "PMI_RANK", "PMIX_RANK"):
        if name in environ:
            raise ValueError(
                f"{name}={environ[name]}, but nothing says the rest (ranks, how many, and which of "
                "this machine): start by torchrun, mpirun or srun, set RANK, WORLD_SIZE, "
                f"LOCAL_RANK and LOCAL_WORLD_SIZE, or unset {name} to run one process alone"
            )


# ---- reading variables --------------------------------------------------------------------------


def _require(environ: Mapping[str, str], launcher: str, names: list[str]) -> str:
    """Return the remedy where a variable is wrong. Raise ValueError if one is not set."""
    remedy = f"{launcher} sets {', '.join(names)}; unset all of them to run one process alone"
    for name in names:
        if name not in environ:
            there = next(other for other in names if other in environ)
            raise ValueError(f"{there}={environ[there]}, but {name} is not set: {remedy}")
    return remedy


def _numbers(environ: Mapping[str, str], launcher: str, names: list[str]) -> tuple[int, ...]:
    remedy = _require(environ, launcher, names)
    for name in names:
        if not re.fullmatch(r"[0-9]{1,10}", environ[name]):
            raise ValueError(f"{name}={environ[name]!r}: must be a whole number: {remedy}")
    return tuple(int(environ[name]) for name in names)


def _ranks(environ: Mapping[str, str], launcher: str, names: list[str]) -> tuple[int, ...]:
    """Return rank and size, and those of this machine: 0 and 1 if they have no variables."""
    numbers = _numbers(environ, launcher, names)
    for rank, size in zip(names[::2], names[1::2]):
        if int(environ[rank]) >= int(environ[size]):
            raise ValueError(
                f"{rank}={environ[rank]}, but {size}={environ[size]}: both must come from the same "
                f"launcher ({launcher})"
            )
    return (*numbers, 0, 1)[:4]


def _master(environ: Mapping[str, str]) -> tuple[str, int] | tuple[None, None]:
    """Return the address of rank 0. Scripts for srun and mpirun set it as well."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not (host and port):
        return None, None
    (number,) = _numbers(environ, "the launch", ["MASTER_PORT"])
    if not 0 < number < 1 << 16:
        raise ValueError(f"MASTER_PORT={port}: must be a port, from 1 to 65535")
    return host, number
