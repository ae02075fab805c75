"""Fixtures of the tests of ranks."""

import subprocess
import sys
import time

import pytest
from rank_processes import BEGIN, END, Rank, free_port


@pytest.fixture
def start(tmp_path):
    """start(body, size) -> ranks, each of which runs the body: the inside of a function."""
    begun: list[subprocess.Popen] = []

    def run(body, size=2, ranks=None, deadline=2.0, seconds=20.0, port=None):
        port = free_port() if port is None else port
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        made = []
        for rank in range(size) if ranks is None else ranks:
            words = [str(word) for word in (rank, size, port, tmp_path, deadline, seconds)]
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", BEGIN + lines + END, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            begun.append(process)
            made.append(Rank(process, []))
        return made

    yield run
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def within():
    """within(seconds) is a context that must not take longer."""

    class Within:
        def __init__(self, seconds):
            self.seconds = seconds

        def __enter__(self):
            self.began = time.monotonic()

        def __exit__(self, *exception):
            took = time.monotonic() - self.began
            assert exception[0] or took < self.seconds, f"{took:.1f} s, not {self.seconds} s"

    return Within
