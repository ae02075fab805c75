"""A machine with GPUs that are none: a copy of needle whose CUDA backend computes on the CPU
(fake_cuda.c), and an nvidia-smi that answers as SMI says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import fake_gpus, run, shared_library

DRIVER = "int cuDriverGetVersion(int *version) { *version = 12080; return 0; }"
# Appended to needle/diagnose/ranks.py. FAULT="die 1 2": what rank 1 does in its second exchange.
FAULT = """
import os, signal
calls, rightly = 0, Group.begin
def begin(self, name, sends, receives):
    global calls, tree_sum
    calls += 1
    what, _, when = os.environ.get("FAULT", "").partition(" ")
    if what == "stop" and when.endswith(f" {calls}"):
        self.control.deadline = 2.0  # the other rank waits as long, and MPI waits by polling
    if when == f"{self.rank} {calls}":
        if what == "send":
            sends = [(rank, _C.multiply(array, 2.0)) for rank, array in sends]
        elif what == "add":
            tree_sum = lambda parts: parts[0]
        else:
            from needle.distributed.mpi import MPI
            MPI.COMM_WORLD.Probe()  # the other rank has come to this exchange
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
    return rightly(self, name, sends, receives)
Group.begin = begin
"""
# Appended to needle/diagnose/device.py: for a GPU's sizes the CPU takes seconds.
SMALL_RATES = "SIDE, BYTES = 512, 1 << 22\n"
# Answers --query-gpu and --query-compute-apps from SMI: {"gpu": [{field: value}], ...}.
NVIDIA_SMI = f"""#!{sys.executable}
import json, os, sys
what, fields = sys.argv[1].removeprefix("--query-").split("=")
state = json.loads(os.environ["SMI"])
if "error" in state:
    sys.exit(state["error"])
for row in state[what]:
    for field in fields.split(","):
        if field not in row:
            print(f'Field "{{field}}" is not a valid field to query.')
            sys.exit(2)
    print(", ".join(row[field] for field in fields.split(",")))
"""
HEALTHY = """uuid GPU-{}|index {}|name NVIDIA Pretend|memory.used 1024|memory.free 143360
memory.total 144384|utilization.gpu 0|temperature.gpu 35|power.draw 120.10|power.limit 700.00
clocks.sm 1980|clocks.max.sm 1980|ecc.errors.uncorrected.volatile.total 0|mig.mode.current Disabled
retired_pages.pending [N/A]|remapped_rows.pending No|remapped_rows.failure No|compute_mode Default
clocks_event_reasons.sw_thermal_slowdown Not Active|ecc.mode.current Enabled
clocks_event_reasons.hw_thermal_slowdown Not Active|persistence_mode Enabled
clocks_event_reasons.hw_power_brake_slowdown Not Active"""


def smi_of(*changes: dict[str, str | None], holders: tuple[tuple[int, str], ...] = ()) -> str:
    """SMI for a GPU for each of `changes` of its fields (None: the driver does not know the field),
    and for processes (GPU, name)."""
    gpus = []
    for index, change in enumerate(changes):
        words = re.split(r"\||\n", HEALTHY.format(index, index))
        row = dict(word.split(" ", 1) for word in words) | change
        gpus.append({field: value for field, value in row.items() if value is not None})
    app = {"pid": "71", "used_memory": "512"}
    apps = [app | {"gpu_uuid": f"GPU-{gpu}", "process_name": name} for gpu, name in holders]
    return json.dumps({"gpu": gpus, "compute-apps": apps})


@pytest.fixture
def smi():
    return smi_of


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, **more: object) -> dict[str, str]:
        return {
            "SMI": smi_of({}, {}),
            "FAKE_GPUS": "2",
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "NEEDLE_REQUIRE_CUDA": "0",
            **{name: str(value) for name, value in more.items()},
        }

    def diagnose(self, *words: str, under: tuple = (), **more) -> subprocess.CompletedProcess:
        """under: the words of a launcher."""
        words = (*under, sys.executable, "-m", "needle.diagnose", *words)
        return run(*words, cwd=self.folder, **self.environment(**more))


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    fake_gpus(folder)
    with open(folder / "needle/diagnose/ranks.py", "a") as file:
        file.write(FAULT)
    with open(folder / "needle/diagnose/device.py", "a") as file:
        file.write(SMALL_RATES)
    for name in "lib", "bin":
        (folder / name).mkdir()
    (folder / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "bin/nvidia-smi").chmod(0o755)
    shared_library(DRIVER, folder / "lib/libcuda.so.1")
    return Machine(folder)
