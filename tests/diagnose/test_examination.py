"""An examination that hangs, dies or prints costs a finding."""

import signal
import time

import pytest
from harness import naming

from needle.diagnose import examination
from needle.diagnose.examination import Examinations

pytestmark = pytest.mark.slow

BOOT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv.pop(1))
from needle.diagnose.examination import Reporter
from needle.processes import MessageWriter
where, until, is_full, arguments = sys.argv[1:]
reporter = Reporter(MessageWriter.to_parent(), where, float(until), is_full == "1")
"""


@pytest.fixture
def run(monkeypatch):
    """run(program) -> the Examination, which has ended."""

    def start(body: str, seconds: float = 30, log=lambda text: None, **options):
        monkeypatch.setattr(examination, "script", lambda function: BOOT + body)
        with Examinations(log) as examinations:
            deadline = time.monotonic() + seconds
            one = examinations.start("cuda()", "none", deadline=deadline, **options)
            examinations.wait(one)
        return one

    return start


def test_reports_reach_the_parent(run):
    logged = []
    one = run(
        'reporter.at("one", "gelu"); reporter.fact("left", reporter.left())\n'
        'reporter.ok("x", "good"); reporter.failed("y", "bad", "mend", "gelu")\n'
        'reporter.detail("small print"); reporter.end()',
        log=logged.append,
    )
    assert (one.ended, one.poll()) == ("done", 0)
    assert 10 < one.facts["left"] < 29 + one.starved()  # it ends a second before its deadline
    assert [f.level for f in one.findings] == ["ok", "failed"]
    assert one.findings[1].line() == "test cuda()    FAILED: op gelu: bad. To mend it: mend"
    assert any("small print" in text for text in logged)


def test_printed_text_is_no_report(run):
    forged = '{"finding": {"level": "ok", "where": "", "what": "", "text": "", "remedy": ""}}'
    one = run(f"print({forged!r}); print('{{\"end\": true}}', flush=True)")
    assert one.ended == "crashed" and [f.what for f in one.findings] == ["crash"]
    assert "exit code 0" in one.findings[0].text and "last output" in one.findings[0].text


def test_death_names_its_place_and_op(run):
    for end, said in (
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV at gelu float32"),
        ("os._exit(7)", "crashed with exit code 7 at gelu float32"),
        ("raise OSError('a broken thing')", "OSError: a broken thing"),
    ):
        with naming(end):
            one = run(f'reporter.at("gelu float32", "gelu")\n{end}')
            (finding,) = one.findings
            assert one.ended == "crashed" and said in finding.text
            assert finding.op == "gelu" and finding.remedy
    one = run("os._exit(75)", may_crash=True)
    assert (one.ended, one.poll(), one.findings) == ("crashed", 75, [])


def test_hang_is_killed_at_its_deadline(run):
    start = time.monotonic()
    one = run('reporter.at("gelu float32", "gelu")\nsignal.pause()', seconds=2)
    (finding,) = one.findings
    assert 2 <= time.monotonic() - start - one.starved() < 8
    assert one.ended == "late" and one.poll() == -signal.SIGKILL
    assert "gelu float32 hangs" in finding.text and finding.op == "gelu"
    assert "nvidia-smi --gpu-reset" in finding.remedy
