"""A short form of the fuzz (tests/fuzz.py), in processes of its own, over the core as it is."""

import subprocess
import sys

from harness import ROOT


def test_nothing_is_found():
    command = [sys.executable, str(ROOT / "tests" / "fuzz.py"), "--jobs", "1", "--count", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "findings: 0" in done.stdout, done.stdout + done.stderr


SEEN = """
import sys
sys.path.insert(0, sys.argv[1])
import fuzz
exec(fuzz.HEAD, fuzz.NAMES)
from fuzzing import grammar, hostile, lines
meter, journal, kept = fuzz.Meter(), fuzz.Journal(sys.argv[2]), []

def found(*drawn):
    'What a case of these lines is.'
    todo = [drawn]
    lines.Lines.draw = lambda self: (todo.pop() if todo else ["pass"], ())
    try:
        fuzz.case(16, meter, journal, set())
    except fuzz.Found as error:
        print(error)
    else:
        print("nothing")
    hostile.FAULTS.clear()
    kept.clear()

fuzz.NAMES["keep"] = kept.append
found("raise ValueError('the contract')")
found("raise SystemError('a NULL')")
found("raise KeyError('undocumented')")
found("v1 = made((3,))", "v1.fill(7)")
found("keep(made((3,)))")
found("keep(Index(3))")
found("together(lambda: {}['undocumented'])")
held = [None] * 1000
fuzz.NAMES["hold"] = lambda: held.insert(0, bytes(100)) or held.pop()
found("hold()")
"""


def test_a_finding_is_seen(tmp_path):
    command = [sys.executable, "-c", SEEN, str(ROOT / "tests"), str(tmp_path / "journal")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "nothing",
        "SystemError: a NULL",
        "KeyError: 'undocumented'",
        "an array that is only read has changed: v1",
        "left behind: {'bytes in arrays': 12, 'references to NDArray': 1}",
        "left behind: {'hostile objects': 1}",
        "KeyError in a thread: 'undocumented'",
        "leaks when it is repeated: memory",
    ], done.stdout + done.stderr
