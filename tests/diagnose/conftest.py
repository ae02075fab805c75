"""A machine with GPUs that are none: fake libraries of NVIDIA's, and a copy of needle whose CUDA
backend computes on the CPU, all open to injected faults (fake.h)."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, copy_needle, core_objects, run, shared_library

from needle.diagnose import examination
from needle.diagnose.examination import Examination, Examinations, Reporter
from needle.diagnose.finding import Finding

HERE = Path(__file__).parent


def objects() -> list[Path]:
    """The CPU backend and the core beneath it, as `make lib` left them."""
    built = core_objects()
    sources = [*ROOT.glob("csrc/cpu/*.c"), *ROOT.glob("csrc/*.c")]
    return [built / source.relative_to(ROOT).with_suffix(".o") for source in sources]


def blas() -> list[str]:
    """Library of the core's matrix product, from the libraries of this process."""
    maps = Path("/proc/self/maps").read_text()
    found = sorted(set(re.findall(r"(/\S*lib(?:scipy_)?openblas\S*\.so\S*)", maps)))
    return [word for path in found for word in (path, f"-Wl,-rpath,{Path(path).parent}")]


@dataclasses.dataclass
class Machine:
    folder: Path

    def environment(self, injected: str = "", **more: str) -> dict[str, str]:
        return os.environ | {
            "NEEDLE_FAKE": injected,
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "NEEDLE_REQUIRE_CUDA": "0",
            **more,
        }

    def run(self, *words: str, injected: str = "", **more: str) -> subprocess.CompletedProcess:
        words = (sys.executable, "-m", "needle.diagnose", *words)
        return run(*words, cwd=self.folder, **self.environment(injected, **more))

    def told(self, *words: str, injected: str = "", **more: str) -> tuple[int, dict]:
        """(exit code, the JSON object)."""
        done = self.run("--json", *words, injected=injected, **more)
        assert done.stderr == "", done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    copy_needle(folder)
    (folder / "lib").mkdir()
    linked = ["-fvisibility=hidden", "-fopenmp", *objects(), *blas(), "-lm", "-Wl,-z,defs"]
    for source, library, more in (
        ("fake_nvml.c", "lib/libnvidia-ml.so.1", []),
        ("fake_driver.c", "lib/libcuda.so.1", []),
        ("fake_backend.c", "needle/_cuda.so", linked),
    ):
        shared_library(f'#include "{HERE / source}"', folder / library, *more)
    return Machine(folder)


@pytest.fixture
def here(machine, monkeypatch):
    """here(injected): examinations of this process examine the fake machine."""
    monkeypatch.setattr(examination, "ROOT", machine.folder)

    def inject(injected: str) -> None:
        environment = machine.environment(injected)
        for name in ("NEEDLE_FAKE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, environment[name])

    return inject


@pytest.fixture
def pynvml():
    """The test reads the fake NVML, which takes the package."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


class Heard(Reporter):
    """A Reporter whose findings and facts stay in this process."""

    def __init__(self) -> None:
        self.subject, self.is_full, self.current_check, self.op = "cpu()", False, "start", None
        self.seconds = 1e9
        self.findings: list[Finding] = []
        self.facts: dict = {}

    def left(self) -> float:
        return self.seconds

    def _write(self, **message) -> None:
        if "finding" in message:
            self.findings.append(Finding(**message["finding"]))
        if "fact" in message:
            self.facts |= [message["fact"]]

    def levels(self) -> dict[str, list[str]]:
        """The texts by level."""
        return {
            level: [f.text for f in self.findings if f.level == level]
            for level in ("ok", "note", "failed")
        }


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def examined(machine, monkeypatch):
    """examined(module, *words, injected=..., seconds=...) -> the Examination of the fake machine,
    which has ended."""
    monkeypatch.setattr(examination, "ROOT", machine.folder)

    def examine(
        module: str, *words, where: str = "machine", injected: str = "", seconds: float = 60
    ) -> Examination:
        with Examinations() as examinations:
            deadline = time.monotonic() + seconds
            env = machine.environment(injected)
            one = examinations.start(where, f"{module}.examine", *words, deadline=deadline, env=env)
            examinations.wait(one)
        return one

    return examine
