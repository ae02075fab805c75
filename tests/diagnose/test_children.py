"""A child of the diagnosis that hangs, dies, prints or loses its parent costs a finding."""

import os
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT

from needle import processes
from needle.diagnose import children
from needle.diagnose.children import Crew, Teller

pytestmark = pytest.mark.slow

BOOT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv.pop(1))
from needle.diagnose.children import Teller
from needle.processes import MessageWriter
where, until, is_full, role = sys.argv[1:]
teller = Teller(MessageWriter.to_parent(), where, float(until), is_full == "1")
"""


@pytest.fixture
def run(monkeypatch):
    """run(what it does) -> the Child."""

    def start(body: str, seconds: float = 30, log=lambda text: None, **options):
        monkeypatch.setattr(children, "BOOT", BOOT + body)
        with Crew(log) as crew:
            deadline = time.monotonic() + seconds
            child = crew.start("cuda()", "none", deadline=deadline, **options)
            crew.wait(child)
        return child

    return start


def test_what_a_child_says_is_heard(run):
    said = []
    child = run(
        'teller.at("one", "gelu"); teller.fact("a", [1]); teller.ok("x", "good")\n'
        'teller.failed("y", "bad", "mend", "gelu"); teller.detail("small print"); teller.end()',
        log=said.append,
    )
    assert (child.ended, child.exit, child.facts) == ("done", 0, {"a": [1]})
    assert [f.level for f in child.findings] == ["ok", "failed"]
    assert child.findings[1].line() == ("test cuda()    FAILED: op gelu: bad. To mend it: mend")
    assert any("small print" in text for text in said)


def test_what_it_prints_is_none_of_its_words(run):
    forged = '{"finding": {"level": "ok", "where": "", "what": "", "text": "", "remedy": ""}}'
    child = run(f"print({forged!r}); print('{{\"end\": true}}', flush=True)")
    assert child.ended == "died" and [f.what for f in child.findings] == ["death"]
    assert "exit code 0" in child.findings[0].text and "last words" in child.findings[0].text


@pytest.mark.parametrize(
    "end, said",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV at gelu float32"),
        ("os.kill(os.getpid(), 40)", "died by signal 40 at gelu float32"),
        ("os._exit(7)", "died by exit code 7 at gelu float32"),
        ("raise OSError('a broken thing')", "OSError: a broken thing"),
    ],
)
def test_a_death_names_what_it_was_at(run, end, said):
    child = run(f'teller.at("gelu float32", "gelu")\n{end}')
    (finding,) = child.findings
    assert child.ended == "died" and said in finding.text
    assert finding.op == "gelu" and finding.remedy


def test_a_death_that_was_wanted_is_no_finding(run):
    child = run("os._exit(75)", is_doomed=True)
    assert (child.ended, child.exit, child.findings) == ("died", 75, [])


def test_what_hangs_is_killed_at_its_deadline(run):
    start = time.monotonic()
    child = run('teller.at("gelu float32", "gelu")\nsignal.pause()', seconds=2)
    (finding,) = child.findings
    assert 2 <= time.monotonic() - start - child.starved() < 8
    assert child.ended == "late" and child.exit == -signal.SIGKILL
    assert "gelu float32 hangs" in finding.text and finding.op == "gelu"
    assert "nvidia-smi --gpu-reset" in finding.remedy


def test_time_in_line_for_a_processor_does_not_count(run, monkeypatch):
    monkeypatch.setattr(processes, "starved", lambda pid="self": 20.0)
    child = run("time.sleep(1); teller.end()", seconds=0.5)
    assert child.ended == "done"


def test_the_scheduler_says_how_long_a_process_stood_in_line():
    assert 0 <= processes.starved() < time.monotonic()
    assert processes.starved(2**22 + 1) == 0


def test_a_child_knows_its_time_and_ends_a_second_before_the_deadline(run):
    child = run('teller.fact("left", teller.left()); teller.end()', seconds=30)
    assert 10 < child.facts["left"] < 29 + child.starved()


def test_a_child_ends_with_its_parent():
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom needle.diagnose import children\n"
            f"children.BOOT = {BOOT!r} + 'teller.end(); signal.pause()'\n"
            "child = children.Child('x', 'none', deadline=time.monotonic() + 600)\n"
            "import select; select.select([child], [], [])\n"
            "print(child.pid, flush=True); time.sleep(600)",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
        parent.kill()
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_child_whose_parent_is_gone_does_nothing():
    done = subprocess.run(
        [sys.executable, "-c", children.BOOT, str(ROOT), "x", "0", "0", "machine"],
        env=os.environ | {processes.MESSAGES: "1:1"},
        stdout=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (1, b"")


def test_leaving_the_crew_leaves_nobody(monkeypatch):
    monkeypatch.setattr(children, "BOOT", BOOT + "signal.pause()")
    before = set(os.listdir("/proc/self/fd"))
    with Crew() as crew:
        child = crew.start("x", "none", deadline=time.monotonic() + 600)
    assert child.exit == -signal.SIGKILL
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_teller_says_long_things_whole(tmp_path):
    read, write = os.pipe()
    teller = Teller(processes.MessageWriter(write), "x", 0.0, False)
    assert not os.get_inheritable(write)
    teller.detail("y" * 30_000)
    assert os.read(read, 1 << 16).count(b"y") == 30_000
    os.close(read)
    os.close(write)
