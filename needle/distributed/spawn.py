"""Start a command as ranks on this machine, one for each GPU, without a launcher.

Each process gets torchrun's variables, NEEDLE_LAUNCH, which names this start, and NEEDLE_RANKS_KEY,
the secret of its ranks. Rank 0 writes where this process does, and alone has the heartbeat of a
supervisor above. Of the others only stderr is printed, each line as `rank 3: ...`.

SIGINT, SIGTERM, SIGHUP and SIGABRT (a supervisor's request for stacks) are passed on to each rank.
After one rank has failed, the others learn of it by the control channel and have its deadline to
end by themselves; then they are killed. All end with this process.

The exit code is 0 if all ranks end with 0; 75 (os.EX_TEMPFAIL) if one exits with it, or is killed
by a signal that was not passed on, since a restart may help; else that of the first that failed.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from needle.distributed.control import DEADLINE
from needle.files import printable
from needle.processes import HEARTBEAT, collecting, kill, pass_on, signal_name, start

MARGIN = 10.0  # seconds more, for a rank to reach its next collective
TICK = 0.1  # seconds between two looks at the processes


def run(command: Sequence[str], count: int, deadline: float = DEADLINE) -> int:
    """Start `command` as `count` ranks, wait for them, and return the exit code. `deadline`: of
    their control channel, in seconds. 127 and 126, and a message, if the command is missing or
    cannot be run."""
    signals: list[int] = []
    running: dict[int, subprocess.Popen] = {}
    with collecting(signals, signal.SIGINT, signal.SIGTERM, signal.SIGABRT):
        try:
            for rank, environ in enumerate(environments(count)):
                heard = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} if rank else {}
                running[rank] = start(command, env=environ, **heard)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        readers = [
            threading.Thread(target=_print_lines, args=(rank, child.stderr), daemon=True)
            for rank, child in running.items()
            if rank
        ]
        for reader in readers:
            reader.start()
        code = _follow(running, signals, deadline)
    for reader in readers:
        reader.join(1.0)  # a grandchild may hold the pipe open
    return code


def _follow(running: dict[int, subprocess.Popen], signals: list[int], deadline: float) -> int:
    """Wait for the ranks. Return the exit code of all."""
    passed_on: set[int] = set()
    failed: list[int] = []  # exit codes, in the order of the failures
    patience = math.inf
    while running:
        time.sleep(TICK)
        passed_on.add(pass_on(signals, running.values()))
        ended = {rank: child.poll() for rank, child in running.items()}
        ended = {rank: code for rank, code in ended.items() if code is not None}
        # Of those that ended since the last look, one with os.EX_TEMPFAIL mostly followed another.
        for rank, code in sorted(ended.items(), key=lambda one: one[1] == os.EX_TEMPFAIL):
            del running[rank]
            was_killed = code < 0 and -code not in passed_on
            if code == 0:
                continue
            if not failed:
                patience = time.monotonic() + deadline + MARGIN
            if not failed or was_killed:  # other ranks print their own reason
                killed = f"was killed by {signal_name(-code)}"
                say(f"rank {rank} {killed if code < 0 else f'ended with code {code}'}")
            failed.append(os.EX_TEMPFAIL if was_killed else 128 - code if code < 0 else code)
        if running and time.monotonic() > patience:
            say(f"ranks that do not end by themselves: {', '.join(map(str, running))}: SIGKILL")
            for child in running.values():
                kill(child)
            break
    return os.EX_TEMPFAIL if os.EX_TEMPFAIL in failed else failed[0] if failed else 0


def _print_lines(rank: int, stderr: IO[bytes]) -> None:
    for line in stderr:
        if line.strip():
            say(line.rstrip(b"\n").decode(errors="replace"), f"rank {rank}")


def environments(count: int) -> list[dict[str, str]]:
    """Return the environment of each rank of a start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "NEEDLE_LAUNCH": secrets.token_hex(8),
        "NEEDLE_RANKS_KEY": secrets.token_hex(32),
    }
    # Waiting threads spin: all ranks together have no more threads than there are processors.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    made = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    for environ in made[1:]:
        environ.pop(HEARTBEAT, None)
    return made


def say(text: str, prefix: str = "needle") -> None:
    """Print a line for people."""
    with contextlib.suppress(OSError):  # the reader is gone
        # One write: print() may write the end separately.
        sys.stderr.write(printable(f"{prefix}: {text}\n"))
        sys.stderr.flush()
