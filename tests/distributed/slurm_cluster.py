"""A Slurm of one machine, this one, whose daemons and files end with the test."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rank_processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
# --mpi=pmix opens its library by a name that only libpmix-dev has.
REMEDY = "apt-get install --no-install-recommends slurm-wlm munge libpmix-dev"
CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=pmix
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return the reason why no Slurm can start here, or None."""
    path = os.environ["PATH"] + ":/usr/sbin"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if lacking:
        return f"no {', '.join(lacking)} ({REMEDY})"
    # In a process of its own: MPI has a libpmix too, and takes one that is there already.
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libpmix.so')"]
    if subprocess.run(load, capture_output=True).returncode != 0:
        return f"no libpmix.so ({REMEDY})"
    return None if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    def __init__(self, folder: Path) -> None:
        """close() ends what start() starts."""
        self.folder, self._daemons = folder, []
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.environ |= {
            "SLURM_CONF": f"{folder}/slurm.conf",
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }

    def start(self) -> None:
        """Returns once it has run a job; RuntimeError with what the daemons say where none runs."""
        folder = self.folder
        for name in "state", "spool":
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = platform.node().partition(".")[0]
        text = CONFIG.format(
            host=host, folder=folder, ctld_port=free_port(), slurmd_port=free_port()
        )
        (folder / "slurm.conf").write_text(text)
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            f"--socket={folder}/munge.socket",
            *(f"--{what}-file={folder}/munge.{what}" for what in ("pid", "log", "seed")),
        )
        self._wait(lambda: (folder / "munge.socket").exists())
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        idle = self._wait(lambda: self.ask("sinfo", "--noheader", "--format=%T").strip() == "idle")
        heard = self.ask("srun", "--ntasks=2", "echo", "heard").split() if idle else []
        if heard != ["heard"] * 2:
            raise RuntimeError(f"Slurm takes no job: {' '.join(heard)} | {self._said()}")

    def ask(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60,
        ).stdout  # fmt: skip

    def close(self) -> None:
        self.ask("scancel", "--full", "--state=RUNNING")
        self.ask("scancel", "--state=PENDING")
        self._wait(lambda: not self.ask("squeue", "--noheader"))
        for process in reversed(self._daemons):
            process.terminate()
        for process in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def _start(self, name: str, *flags: str) -> None:
        with (self.folder / f"{name}.said").open("w") as said:
            self._daemons.append(
                subprocess.Popen([name, *flags], env=self.environ, stdout=said, stderr=said)
            )

    def _said(self) -> str:
        ends = [path.read_text().splitlines()[-1:] for path in self.folder.glob("*.said")]
        return " | ".join(line for end in ends for line in end)

    @staticmethod
    def _wait(done, seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True
