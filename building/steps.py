"""The steps of a build: commands that make one file each, in parallel, and only when something
changed: a source, a header of the compiler's depfile, the command, or the compiler itself."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


# On a terminal progress is one line that moves, which whatever comes next overwrites.
OVERWRITE = "\r\x1b[K" if sys.stdout.isatty() else ""
_notes: list[str] = []


def say(text: str) -> None:
    print(f"{OVERWRITE}needle: {text}", flush=True)


def note(text: str) -> None:
    """Queue a line about the build's choices, printed once, when there is something to do."""
    _notes.append(text)


def say_notes() -> None:
    while _notes:
        say(_notes.pop(0))


def say_progress(text: str) -> None:
    if OVERWRITE:
        columns = shutil.get_terminal_size().columns
        print(f"{OVERWRITE}needle: {text}"[: columns + len(OVERWRITE) - 1], end="", flush=True)
    else:
        say(text)


def fail(text: str):
    """End the build with one line."""
    print(OVERWRITE, end="", flush=True)
    raise SystemExit(f"needle: error: {text}")


def setting(name: str, *allowed: str) -> str:
    """An environment variable that is one of `allowed`, by default the first."""
    value = os.environ.get(name, "").strip().lower() or allowed[0]
    if value not in allowed:
        fail(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def flags_from(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def strict() -> list[str]:
    return ["-Werror"] if setting("NEEDLE_WERROR", "0", "1") == "1" else []


def is_debug() -> bool:
    """True if NEEDLE_DEBUG=1 asks for the build that checks indices."""
    return setting("NEEDLE_DEBUG", "0", "1") == "1"


def job_count() -> int:
    wanted = os.environ.get("NEEDLE_JOBS", "").strip() or str(len(os.sched_getaffinity(0)))
    if not (wanted.isdigit() and int(wanted) > 0):
        fail(f"NEEDLE_JOBS={wanted!r} is not a positive whole number")
    return int(wanted)


def run(command: list, timeout: float | None = None) -> tuple[bool, str]:
    """(did it succeed, what it printed)."""
    words = [str(word) for word in command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(words, cwd=ROOT, timeout=timeout, **pipes)
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout.decode(errors="replace").rstrip()


def output_of(*command: object) -> str:
    """Empty when the command cannot run or fails."""
    succeeded, text = run([*command], timeout=60)
    return text if succeeded else ""


def find_compiler(variable: str, names: str, package: str) -> list[str]:
    """The command of $CC or $CXX, else the first of `names` on the PATH."""
    for name in [os.environ.get(variable), *names.split()]:
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    fail(f"none of {names} is here: apt install {package}, or set {variable}")


@dataclasses.dataclass
class Step:
    """`command -o output` compiles or links `inputs`. `identity` is the compiler's."""

    verb: str
    command: list[str]
    inputs: list[Path]
    output: Path
    stamp: Path  # the digest of what made the output; the depfile of a compilation lies beside it
    identity: str = ""
    edit: list[str] = dataclasses.field(default_factory=list)  # changes the output in place

    def digest(self) -> str:
        made_by = repr((self.command, self.output, self.identity, *self.edit))
        return hashlib.sha256(made_by.encode()).hexdigest()

    def is_current(self) -> bool:
        try:
            paths = list(self.inputs)
            if self.verb == "compile":
                depfile = self.stamp.with_suffix(".d").read_text().replace("\\\n", " ")
                names = re.split(r"(?<!\\)\s+", depfile.split(":", 1)[1].strip())
                paths += [ROOT / name.replace("\\ ", " ") for name in names]
            made = self.output.stat().st_mtime_ns
            unchanged = all(path.stat().st_mtime_ns <= made for path in paths)
            return unchanged and self.stamp.read_text() == self.digest()
        except OSError:
            return False

    def run(self) -> None:
        """Make the output as a whole or not at all: a running process may have it mapped."""
        for path in (self.output, self.stamp):
            path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_name(f".{self.output.name}.partial.o")
        started = time.time_ns()
        succeeded, text = run([*self.command, "-o", partial])
        if succeeded and self.edit:
            succeeded, text = run([*self.edit, partial])
        if not succeeded:
            partial.unlink(missing_ok=True)
            self.stamp.unlink(missing_ok=True)
            print(OVERWRITE, end="", flush=True)
            print(shlex.join(self.command), text, sep="\n", file=sys.stderr, flush=True)
            name = self.output.name if self.verb == "link" else self.inputs[0].relative_to(ROOT)
            fail(f"{name} does not {self.verb} (its words are above)")
        if text:
            print(OVERWRITE + text, flush=True)
        os.utime(partial, ns=(started, started))  # a source saved meanwhile is newer
        os.replace(partial, self.output)
        self.stamp.write_text(self.digest())


def compile_step(source: Path, objects: Path, command: list[str], identity: str) -> Step:
    out = objects / source.relative_to(ROOT).with_suffix(".o")
    depfile, name = str(out.with_suffix(".d")), str(source.relative_to(ROOT))
    words = [*command, "-MMD", "-MF", depfile, "-c", name]
    return Step("compile", words, [source], out, out.with_suffix(".cmd"), identity)


def build(compiles: list[Step], link: Step) -> None:
    """Compile what is not current, in parallel, then link; say nothing where all is."""
    stale = [step for step in compiles if not step.is_current()]
    if not stale and link.is_current():
        return
    say_notes()
    with concurrent.futures.ThreadPoolExecutor(job_count()) as pool:
        running = {pool.submit(step.run): step for step in stale}
        try:
            for number, done in enumerate(concurrent.futures.as_completed(running), 1):
                done.result()
                say_progress(f"[{number}/{len(stale)}] {running[done].inputs[0].relative_to(ROOT)}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    link.run()
    say(f"linked {link.output.name}")
