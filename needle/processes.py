"""Child processes that end with their parent and report to it, and the exit of programs.

`Child` starts any program in a session of its own, where Ctrl-C of a terminal does not reach it.
A program of needle's may report to its parent in JSON objects, one a line, through a pipe of their
own, so that nothing that a library prints is taken for a message:

    child = Child([sys.executable, "worker.py"], deadline=time.monotonic() + 30, messages=True)
    child.messages()                 # the parent: those that arrived since the last call
    report = MessageWriter.to_parent()
    report.write(step=3)             # worker.py

The kernel kills a child when the thread that started it ends (PR_SET_PDEATHSIG), however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.02  # between two looks at a process that is to end
REAP_SECONDS = 30.0  # in which a killed process must be gone
MESSAGES = "NEEDLE_MESSAGES"  # of a child that reports: PID of the parent, colon, descriptor

_prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child must not wait for a lock
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Exit if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def starved(pid: int | str = "self") -> float:
    """Seconds that the first thread of a process has waited for a processor (second number of
    schedstat); 0 where the system does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


# ---- messages -----------------------------------------------------------------------------------


def json_objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the objects among lines of JSON. Skip other lines, such as one that was cut off."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


class MessageReader:
    """The parent's end of a pipe of JSON objects, one a line.

    Attributes: writer (descriptor of the other end until it is closed), path (a name by which other
    processes of this user open the other end while this one lives; launchers such as mpirun pass no
    descriptors), at_end (true once all writers have closed it).
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.path = f"/proc/{os.getpid()}/fd/{self.writer}"
        self.at_end = False
        self._rest = b""

    def fileno(self) -> int:
        return self._reader

    def read(self) -> list[dict[str, Any]]:
        """Return the objects that have arrived, without waiting. Skip lines that are no object."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, 1 << 16):
                self._rest += data
            self.at_end = True
        *lines, self._rest = self._rest.split(b"\n")
        return json_objects(lines)

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        self.close_writer()
        os.close(self._reader)


class MessageWriter:
    """A child's end of the pipe. It is not passed on to processes that the child starts."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = descriptor

    @classmethod
    def to_parent(cls) -> MessageWriter:
        """Open the pipe to the process that started this one as `Child(..., messages=True)`, and
        die with that process."""
        parent, descriptor = os.environ.pop(MESSAGES).split(":")
        die_with(int(parent))
        return cls(int(descriptor))

    def write(self, **message: Any) -> None:
        """Write one object, whole. Wait while the pipe is full; BlockingIOError where it does not
        wait (a descriptor opened with O_NONBLOCK) and the line does not fit."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._pipe, data) :]


# ---- children -----------------------------------------------------------------------------------


class Child:
    """A program that runs in its own session, reads nothing and ends with this process.

    command: words. env: its environment; None: that of this process. deadline: by
    time.monotonic(), for `is_late`. messages: it is a program of needle's that calls
    `MessageWriter.to_parent()`, which also lets it end with this process; others are tied to it
    before they are executed, which forks this process (slow where it has much memory, and unsafe
    beside threads that hold locks). capture: keep stdout and stderr for `printed`. options: as of
    subprocess.Popen, such as stdout, cwd, pass_fds. OSError where it cannot be started.

    Attributes: pid, process (subprocess.Popen), started (by time.monotonic()), deadline.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        deadline: float = math.inf,
        *,
        messages: bool = False,
        capture: bool = False,
        **options: Any,
    ) -> None:
        self.started, self.deadline = time.monotonic(), deadline
        self._starved, self._was_killed = 0.0, False
        self._reader = MessageReader() if messages else None
        self._output = None
        if capture:
            self._output = os.fdopen(os.memfd_create("needle-output", os.MFD_CLOEXEC), "rb")
        parent, env = os.getpid(), dict(os.environ if env is None else env)
        if self._output is not None:
            options |= {"stdout": self._output, "stderr": subprocess.STDOUT}
        if self._reader is not None:
            env[MESSAGES] = f"{parent}:{self._reader.writer}"
            options["pass_fds"] = (*options.get("pass_fds", ()), self._reader.writer)
        else:
            options["preexec_fn"] = lambda: die_with(parent)
        try:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, **options
            )
        except BaseException:
            self._close_files()
            raise
        if self._reader is not None:
            self._reader.close_writer()
        self.pid = self.process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The pipe of messages, for selectors."""
        return self._reader.fileno()

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived since the last call, without waiting."""
        return self._reader.read()

    @property
    def at_end(self) -> bool:
        """True once no more messages can come."""
        return self._reader.at_end

    def printed(self, most: int = 1 << 62) -> str:
        """Return its output until now, or since `forget_printed`, cut after `most` bytes
        (`capture`)."""
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), min(size, most), 0).decode(errors="replace")
        cut = size - most
        return f"{text}\n[{cut:,} more bytes were printed and cut off]\n" if cut > 0 else text

    def forget_printed(self) -> None:
        """Empty the captured output. It may go on printing."""
        os.ftruncate(self._output.fileno(), 0)
        os.lseek(self._output.fileno(), 0, os.SEEK_SET)  # of the process too, which shares the file

    def poll(self) -> int | None:
        """Return the exit code, -n where signal n killed it, None while it runs."""
        return self.process.poll()

    def starved(self) -> float:
        """Seconds that it has waited for a processor."""
        if self.process.returncode is None:
            self._starved = max(self._starved, starved(self.pid))
        return self._starved

    def is_late(self) -> bool:
        """True after the deadline. Time spent waiting for a processor does not count: a busy
        machine is no hang."""
        return time.monotonic() >= self.deadline and (
            time.monotonic() >= self.deadline + self.starved()
        )

    def wait(self, seconds: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it ends, at most so many seconds or until `given_up()`. Return whether it has
        ended."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end and not given_up():
            time.sleep(POLL_SECONDS)
        return self.process.returncode is not None

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group. Ignore one that has ended."""
        if not group:
            self.process.send_signal(number)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self, seconds: float = REAP_SECONDS) -> bool:
        """Kill its process group. Return whether it is gone within so many seconds: a process that
        waits inside a driver may stay for ever."""
        self.signal(signal.SIGKILL, group=True)
        self._was_killed = True
        return self.wait(seconds)

    def close(self, seconds: float = REAP_SECONDS) -> None:
        """Kill it unless it has ended or was killed, and close the pipe and the captured output."""
        if self.poll() is None and not self._was_killed:
            self.kill(seconds)
        self._close_files()

    def _close_files(self) -> None:
        for file in (self._reader, self._output):
            if file is not None:
                file.close()


def start(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Start a program in a session of its own, where Ctrl-C of a terminal does not reach it. It
    reads nothing, and the kernel kills it when the thread that calls this ends. options: as of
    subprocess.Popen. OSError where it cannot be started."""
    parent = os.getpid()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),
        **options,
    )


def ends_within(child: subprocess.Popen, seconds: float) -> bool:
    """Wait for the end of a process, at most so long. Return whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    return child.returncode is not None


def signal_group(child: subprocess.Popen, number: int) -> None:
    """Send a signal to what `start` started and to its children, as far as they still run."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


# ---- signals ------------------------------------------------------------------------------------


def pass_on(
    signals: list[int], children: Iterable[subprocess.Popen], instead: int | None = None
) -> int:
    """Send the collected signals to children, `instead` in the place of each; Ctrl-Z stops them
    with this process, until fg or bg. Return the last one that ends them, or 0."""
    last = 0
    while signals:
        number = signals.pop(0)
        if number == signal.SIGTSTP:
            for child in children:
                signal_group(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            for child in children:
                signal_group(child, signal.SIGCONT)
        else:
            for child in children:
                child.send_signal(instead or number)
            last = number
    return last


@contextlib.contextmanager
def collecting(into: list[int], *numbers: int) -> Iterator[None]:
    """Append these signals to `into` as they arrive in the block, SIGHUP and SIGTSTP among them,
    unless they are ignored (nohup)."""
    wanted = [*numbers]
    for number in (signal.SIGHUP, signal.SIGTSTP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            wanted.append(number)
    collect = lambda number, frame: into.append(number)
    before = {number: signal.signal(number, collect) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler in C, as the fault handler's, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9. Real-time signals between the first and the last have no name."""
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


# ---- the exit of a program ----------------------------------------------------------------------

EXIT_CLOSED_PIPE = 128 + signal.SIGPIPE
EXIT_INTERRUPTED = 128 + signal.SIGINT


def program(main: Callable[[], int | None]) -> int:
    """Run the `main` of a command-line program and return its exit code. Return EXIT_CLOSED_PIPE
    where the reader of its output has closed it, as `| head` does: a shell sees the same of any
    program that SIGPIPE ends. `main` must let that BrokenPipeError pass. Return EXIT_INTERRUPTED
    after a Ctrl-C that `main` does not catch. Without stdout or stderr (`>&-`) print nothing.
    Print characters that their encoding lacks (LC_ALL=C) as escapes. Say in one line that a disk is
    full, stdout's among them, and return 1."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        if isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        try:
            code = main() or 0
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _output_is_closed():  # it was another pipe
            raise
        silence()
        return EXIT_CLOSED_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            print(f"needle: {error}", file=sys.stderr)
        silence()
        return 1


def command_line(word: str, *program: str) -> list[str]:
    """Return how this environment spells `needle WORD`: by its command, which may be on the PATH,
    or by its Python and the words of the same program."""
    script = Path(sys.executable).with_name("needle")
    if not script.exists():
        return [sys.executable, *program]
    found = shutil.which("needle")
    on_path = found is not None and os.path.samefile(found, script)
    return ["needle" if on_path else str(script), word]


def _output_is_closed() -> bool:
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def terminal_bar(**options: Any) -> Any | None:
    """Return tqdm's bar if standard error is a terminal and tqdm is installed, else None."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(dynamic_ncols=True, **options)


def silence() -> None:
    """Send stdout and stderr to /dev/null, so that they raise nothing after the reader is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
