"""Ranks as processes of their own, light ones: they load the control channel and no needle._C."""

import signal
import socket
import subprocess
from dataclasses import dataclass

from harness import ROOT

# What a rank begins with: `rank`, `size`, and join(); `say` is heard at once.
BEGIN = f"""
import os, signal, sys, time, types
package = types.ModuleType("needle")
package.__path__ = [{str(ROOT / "needle")!r}]
sys.modules["needle"] = package
from needle.distributed.control import Control, RankError, RankFailed
from needle.distributed.environment import Place
rank, size, port, deadline, seconds = (float(word) for word in sys.argv[1:])
rank, size, port = int(rank), int(size), int(port)
def say(*words):
    print(*words, flush=True)
KEY = "the key of the tests"
def join(facts={{}}, rank=rank, size=size, job="test", host="127.0.0.1", local=True, key=KEY):
    there = (rank, size) if local else (0, 1)
    place = Place(rank, size, *there, "torchrun", host, port, job, key)
    return Control.join(place, facts, seconds, deadline)
def main():
"""
END = """
try:
    main()
except (RankError, RankFailed) as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(error.code)
"""
MUST_END = 60.0  # seconds, for ranks that should end at once: the machine may be busy


@dataclass
class Rank:
    process: subprocess.Popen
    words: list[str]

    def heard(self, word: str) -> None:
        """Wait until it says this."""
        while True:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            self.words.append(line.strip())
            if line.strip() == word:
                return

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = MUST_END) -> tuple[int, list[str], str]:
        """(exit code, lines that it said, stderr)."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, self.words + out.splitlines(), err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
