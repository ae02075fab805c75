"""Fixtures of the tests of ranks."""

import subprocess
import sys

import pytest
from rank_processes import BEGIN, END, Rank, free_port
from struck_runs import write_tokens


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "tokens.npy")


@pytest.fixture
def start():
    """start(body, size) -> ranks, each of which runs the body: the inside of a function; once all
    of them have said `heard`."""
    begun: list[subprocess.Popen] = []

    def run(body, size=2, ranks=None, deadline=60.0, seconds=60.0, port=None, heard=None):
        port = free_port() if port is None else port
        lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
        made = []
        for rank in range(size) if ranks is None else ranks:
            words = [str(word) for word in (rank, size, port, deadline, seconds)]
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", BEGIN + lines + END, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            begun.append(process)
            made.append(Rank(process, []))
        for rank in made if heard else ():
            rank.heard(heard)
        return made

    yield run
    for process in begun:
        process.kill()
        process.communicate()
