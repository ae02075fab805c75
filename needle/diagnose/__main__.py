"""Diagnose this machine, this installation of needle, a run or a kernel service.

It prints versions, build and devices, and why a device cannot be used. It asks
nvidia-smi for the state of each GPU: memory errors, throttling, temperature,
power, memory and its holders. It compares every op with a float64 reference on
the CPU and on each GPU, contiguous and on views, and the rates of a GPU with
its data sheet. That takes some seconds; with --full every op is tried in each
dtype, size and layout, which takes minutes.

Under torchrun, mpirun or srun each rank examines its own device. Then all ranks
together gather and add arrays, which are compared with NumPy.

Each part runs in a process of its own with a deadline: one that hangs or dies
is a line with FAILED that names what it tried. The exit code is 0 if all is
right, and 1 after a line with FAILED, which names the op, the GPU or the rank,
and the remedy. A machine without a GPU is right, except with --device or
NEEDLE_REQUIRE_CUDA=1, or where the CUDA backend was built and there is an
NVIDIA driver. The token of a kernel service is in NEEDLE_KERNELS_TOKEN, or in
the file that NEEDLE_KERNELS_TOKEN_FILE names.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from needle.backend_ndarray import cpu
from needle.command import Parser, path, whole, wrapped
from needle.diagnose.parts import FAILED, row, run
from needle.distributed import environment
from needle.distributed.environment import Place
from needle.processes import program

# Ops are compared as they compute by default, and nothing floods the output.
PLAIN = {"NEEDLE_TF32": "0", "NEEDLE_TRACE": "0"}
SHORT, LONG = 60.0, 600.0  # seconds of a part; of one that reads or computes much
TOGETHER = 150.0  # of the collectives
TELL_SECONDS = 2.0  # for other ranks to print what they saw


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="needle diagnose",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--full", action="store_true", help="try every op in every form: minutes")
    made.add_argument("--device", type=whole(0), metavar="N", help="of the GPUs cuda(N) alone")
    made.add_argument(
        "--run", type=path, metavar="FOLDER", help="examine a run's folder: runs/NAME"
    )
    made.add_argument(
        "--server", metavar="URL", help="ask a kernel service: http://127.0.0.1:18188"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. Return its exit code."""
    start, made = time.monotonic(), parser()
    args = made.parse_args(argv)
    try:
        place = environment.find()
    except ValueError as error:
        made.error(str(error))
    label = f"rank {place.rank} of {place.size}: " if place and place.size > 1 else ""

    def say(line: str) -> None:
        text = label + line  # in a file and for grep it stays one line
        is_shown = sys.stdout.isatty() and not label  # mpirun gives its ranks a terminal
        print(wrapped(text, len(row("", ""))) if is_shown else text, flush=True)

    failures = examine(args, place, say)
    verdict = f"FAILED: {failures}, above" if failures else "nothing is wrong"
    say(row("in short", f"{verdict} ({time.monotonic() - start:.1f} s)"))
    return 1 if failures else 0


def examine(args: argparse.Namespace, place: Place | None, say: Callable[[str], object]) -> int:
    """Run the parts in the order in which they are shown. Return the number of failures."""
    failures = 0

    def part(*words: str, seconds: float = SHORT, say: Callable = say, **env: str) -> Any:
        nonlocal failures
        failed, told = run(*words, seconds=seconds, say=say, **env)
        failures += failed
        return told

    rank, local, wanted = 0, 0, ""
    if place is not None:
        rank, local, wanted = place.rank, place.local_rank, str(place.local_rank)
    if args.device is not None:
        wanted = str(args.device)
    is_asked, is_full = str(int(args.device is not None)), str(int(args.full))
    heard = say if rank == 0 else lambda line: FAILED in line and say(line)
    told = part("facts", "facts", wanted, is_asked, say=heard) or {"count": 0, "chosen": []}
    indices = {name: name[5:-1] or "0" for name in told["chosen"]}  # "cuda(1)": "1"
    if not indices or not wanted:
        indices = {str(cpu()): ""} | indices
    seconds, uuid = LONG if args.full else SHORT, None
    for name, index in indices.items():
        uuid = part(name, "device", index, is_full, seconds=seconds, **PLAIN)
    if local == 0 and (told["count"] or shutil.which("nvidia-smi")):
        part("GPUs", "gpus", str(told["count"]), (is_asked == "1" and uuid) or "")
    if place is not None and place.size > 1:
        before = failures
        part("ranks", "ranks", seconds=TOGETHER)
        if failures > before:  # a launcher ends all ranks when one ends: the others print first
            time.sleep(TELL_SECONDS)
    if args.run is not None and rank == 0:
        part("run", "folder", str(args.run), seconds=LONG)
    if args.server is not None and rank == 0:
        part("server", "server", args.server)
    return failures


if __name__ == "__main__":
    sys.exit(program(main))
