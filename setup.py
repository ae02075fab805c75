"""Build needle: needle/_C.<abi>.so from csrc/, and needle/_cuda.so from cuda/ where CUDA is wanted.

building/choices.py decides by the variables of docs/environment.md, building/build.mk compiles what
changed, by make and in parallel.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip runs this file without its folder
from building import choices  # noqa: E402
from building.choices import ROOT, Cuda, fail  # noqa: E402


def facts(version: str, core: dict[str, str], cuda: Cuda | str) -> str:
    """Return built.h, by which the core knows how it was built."""
    left_out = isinstance(cuda, str)
    git = "git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"
    defined = {
        "VERSION": version,
        "COMMIT": (choices.output_of(*git) if (ROOT / ".git").exists() else "") or "unknown",
        "COMPILER": core["COMPILER"],
        "MARCH": core["MARCH_NAME"],
        "BLAS": core["BLAS"],
        "CUDA": "" if left_out else cuda.version,
        "CUDA_ARCHS": "" if left_out else " ".join(cuda.archs),
    }
    lines = [f"#define NEEDLE_BUILD_{name} {json.dumps(text)}" for name, text in defined.items()]
    why = f": {cuda} when it was built" if left_out else ""
    return "\n".join([*lines, f"#define NEEDLE_LEFT_OUT {json.dumps(why)}", ""])


def write(path: Path, text: str) -> None:
    """Write a file where its text changes: what depends on it is made again then."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def make(objects: Path, goals: list[Path]) -> None:
    """Make shared objects: _C, and where it is wanted _cuda.so. SystemExit where that fails."""
    # By paths from ROOT, so that the objects of a copied tree are current.
    place, out, *paths = (os.path.relpath(p, ROOT) for p in (objects, goals[0].parent, *goals))
    command = ["make", "-f", "building/build.mk", f"O={place}", f"OUT={out}"]
    command += [f"PYTHON={sys.executable}"]
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    asked = subprocess.run([*command, "-q", *paths], cwd=ROOT, env=clean, capture_output=True)
    if asked.returncode == 0:
        return
    print("".join(f"needle: {note}\n" for note in choices.notes), end="", flush=True)
    count = os.environ.get("NEEDLE_JOBS") or len(os.sched_getaffinity(0))
    jobs = [f"-j{count}", "-s", "--output-sync=target", "--no-print-directory"]
    if subprocess.run([*command, *jobs, *paths], cwd=ROOT, env=clean).returncode != 0:
        fail("needle does not build: the compiler's words are above")


class BuildExt(build_ext):
    """build_ext that lets make build the shared objects, in place or into build_lib."""

    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT if in_place else Path(self.build_lib).resolve()) / "needle"
        core, backend = package / self.get_ext_filename("_C"), package / "_cuda.so"
        objects = ROOT / self.build_temp
        if self.force:
            shutil.rmtree(objects, ignore_errors=True)
        objects.mkdir(parents=True, exist_ok=True)
        with open(objects / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one tree take turns
            cuda, goals = choices.choose_cuda(), [core]
            stays = in_place or not choices.portable()
            chosen = {"core": choices.for_core(stays)}
            if isinstance(cuda, Cuda):
                chosen["cuda"] = choices.for_cuda(cuda, stays)
                goals.append(backend)
            for name, variables in chosen.items():
                lines = (f"{variable} := {text}\n" for variable, text in variables.items())
                write(objects / f"{name}.mk", "".join(lines))
            write(objects / "built.h", facts(self.distribution.get_version(), chosen["core"], cuda))
            # A core under the sanitizers needs their library, which the stubs' process lacks.
            sanitized = "-fsanitize" in os.environ.get("CFLAGS", "")
            if (package / "autograd" / "operators.py").exists() and not sanitized:
                goals.append(package / "_C.pyi")
            make(objects, goals)
            if backend not in goals and backend.exists():
                backend.unlink()
                print(f"needle: removed {backend.name} of an earlier build: it need not fit this")


class Sdist(sdist):
    """sdist with the stubs, which a build writes."""

    def run(self) -> None:
        if not (ROOT / "needle" / "_C.pyi").exists():
            self.reinitialize_command("build_ext", inplace=True)
            self.run_command("build_ext")
        super().run()


if __name__ == "__main__":
    if sys.platform != "linux":
        fail(f"needle needs Linux, and this is {sys.platform}: on Windows it builds in WSL 2")
    # The Extension only tells setuptools that the wheel depends on the platform.
    setup(
        ext_modules=[Extension("needle._C", [])], cmdclass={"build_ext": BuildExt, "sdist": Sdist}
    )
