"""Groups of processes, a rank on each GPU, that a benchmark asks in turns.

The driver starts all groups at once, and asks one of them at a time by a line of JSON to each of
its processes; each answers by one. So blocks of several groups interleave on the same GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import needle as ndl
from needle.distributed import environment
from needle.distributed.control import Control
from needle.distributed.group import Group, visible_gpus
from needle.distributed.spawn import environments
from needle.processes import start

MARK = "@"  # an answer; other lines go to stderr
WORKER = ("--worker", str, None, argparse.SUPPRESS, "needle", "torch")  # a flag of bench.parser


class Workers:
    """`count` processes of `command`, of which each calls `serve`: the ranks of one group or, where
    `apart`, each alone with a GPU of its own."""

    def __init__(self, name: str, count: int, command: list[str], apart: bool = False) -> None:
        self.name, self.count = name, count
        places = environments(count)
        if apart:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
            places = [
                environments(1)[0] | {"CUDA_VISIBLE_DEVICES": gpu}
                for gpu in visible.split(",")[:count]
            ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [
            start([sys.executable, *command], env=environ, **pipes) for environ in places
        ]

    def ask(self, **question: Any) -> list[Any]:
        """The answers of all, in the ranks' order. SystemExit where one has ended."""
        self.tell(**question)
        return self.answers()

    def tell(self, **question: Any) -> None:
        for process in self._processes:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()

    def answers(self) -> list[Any]:
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen) -> Any:
        for line in process.stdout:
            if line.startswith(MARK):
                return json.loads(line[1:])
            print(f"{self.name}: {line}", end="", file=sys.stderr)
        raise SystemExit(f"{self.name} has ended with code {process.wait()}")

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()


def serve(answer: Callable[..., Any]) -> None:
    """Answers until the driver closes."""
    for line in sys.stdin:
        print(MARK + json.dumps(answer(**json.loads(line))), flush=True)


def join() -> Group:
    """needle's group of the processes of one Workers."""
    place = environment.find()
    return Group() if place.size == 1 else Group(place, Control.join(place, {}))


def own_gpu(group: Group) -> ndl.Device:
    device = ndl.cuda(group.rank)
    group.connect(device)
    return device


def torch_group() -> tuple[int, int]:
    """(rank, count) of this process, whose current device is its GPU."""
    import torch

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    if count > 1:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    return rank, count


def gpus_of(parser: argparse.ArgumentParser, wanted: int | None) -> int:
    """Count the GPUs of a group; an error of the parser where there are fewer than two."""
    visible = visible_gpus()
    gpus = wanted or visible
    if not 2 <= gpus <= visible:
        parser.error(f"{visible} GPUs are visible, and this needs 2 or more of them")
    return gpus
