"""Commands that fail in every way, under a supervisor, and the heartbeat that it reads.
(Trainings that do: tests/apps/test_survival.py.)"""

import contextlib
import json
import os
import signal
import sys
import threading
import time

import pytest
from harness import naming, wait_for

from needle.files import Lock
from needle.processes import HEARTBEAT
from needle.training import heartbeat, supervise
from needle.training.supervise import Supervisor

pytestmark = pytest.mark.slow

# Begin of each command. `say` appends words to a file of the folder where it runs.
BEGIN = """
import os, signal, sys, time
PATH = os.environ["NEEDLE_HEARTBEAT"]
def write(path, text):
    with open(path, "w") as file:
        file.write(str(text))
def beat(step):
    write(PATH, step)
def say(*words):
    with open("said", "a") as file:
        print(*words, file=file)
def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)
with open("starts", "a") as file:
    file.write("x")
    attempt = file.tell() - 1
"""
HANG = 0.6  # seconds


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(code, *words) -> (exit code, words said, lines of faults.jsonl), each time in a folder of
    its own, which is that of the run."""
    monkeypatch.delenv("NEEDLE_SYNC", raising=False)
    monkeypatch.setattr(supervise, "TICK", 0.01)
    monkeypatch.setattr(supervise, "STACK_SECONDS", 0.5)
    monkeypatch.setattr(supervise, "REAP_SECONDS", 0.5)
    monkeypatch.setattr(supervise, "PAUSE", 0.01)
    folders = []

    def start(code, *words, hang=30.0):
        folder = tmp_path / f"run{len(folders)}"
        folders.append(folder)
        folder.mkdir()
        monkeypatch.chdir(folder)
        begin = BEGIN + "write(PATH + '.run', '.')\n"
        command = [sys.executable, "-S", "-c", begin + code, *words]
        done = Supervisor(command, hang, lambda noted: ["--again", str(noted)]).run()
        return done, lines_of(folder / "said"), faults_of(folder)

    return start


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def faults_of(folder):
    return [json.loads(line) for line in lines_of(folder / "faults.jsonl")]


# ---- restarts -----------------------------------------------------------------------------------


def test_other_exit_codes_are_passed_on(run, tmp_path, capfd):
    for code in (0, 1, 76, 130, 143):
        with naming("exit code", code):
            assert run(f"say('here'); sys.exit({code})") == (code, ["here"], [])
    assert capfd.readouterr() == ("", "")
    (tmp_path / "data.txt").write_text("")
    for name, code in [("no-such-command", 127), ("data.txt", 126)]:
        assert supervise.main(["--", str(tmp_path / name)]) == code
        err = capfd.readouterr().err
        assert f"supervise: {tmp_path / name}: " in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "end, code, message",
    [
        ("sys.exit(75)", 75, "the GPU or a rank is lost"),
        ("die(signal.SIGTERM)", 143, "killed by SIGTERM"),  # not from us
        ("sys.exit(128 + 9)", 137, "killed by SIGKILL"),  # of a launcher's rank
        ("sys.exit(128 + 7)", 135, "killed by SIGBUS"),  # a file of tokens shrank
        ("sys.exit(128 + 4)", 132, "killed by SIGILL"),
        ("sys.exit(128 + 8)", 136, "killed by SIGFPE"),
        ("time.sleep(60)", 134, "nothing finished for 1 s"),
        ("die(signal.SIGSTOP)", 134, "nothing finished for 1 s"),
        ("signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(60)", 137, "nothing finished"),
        ("signal.signal(signal.SIGABRT, lambda *_: os._exit(0)); time.sleep(60)", 75, "nothing f"),
    ],
)
def test_failure_is_followed_by_a_restart_in_the_noted_folder(run, capfd, end, code, message):
    """The rest of its process group is killed before."""
    body = f"""
say(*sys.argv[1:])
if attempt:
    sys.exit(7)
beat(3)
if os.fork() == 0:
    time.sleep(60)
say(os.getpid())
beat(4)
{end}
"""
    done, said, [fault] = run(body, "--steps", "9", hang=HANG)
    assert done == 7 and said[::2] == ["--steps 9", "--steps 9 --again ."]
    assert fault["message"].startswith(message) and fault["time"].endswith("+00:00")
    assert (fault["step"], fault["exit"], fault["action"]) == (4, code, "restart")
    err = capfd.readouterr().err
    assert f"supervise: after step 4: {fault['message']}: restart\n" in err
    if code == 134:
        assert "Fatal Python error: Aborted" in err and 'File "<string>", line ' in err
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.killpg(int(said[1]), 0)
            time.sleep(0.01)


def test_silence_is_a_hang_only_after_a_heartbeat(run):
    for code in (
        "time.sleep(3 * float(sys.argv[1]))",
        "beat(0); os.unlink(PATH); time.sleep(3 * float(sys.argv[1]))",
        "beat(0)\nfor _ in range(6):\n    time.sleep(float(sys.argv[1]) / 3); os.utime(PATH)",
        "write(PATH, 'x'); sys.exit(0)",
        "open(PATH, 'wb').write(bytes([255])); sys.exit(0)",
    ):
        with naming(code):
            assert run(code, str(HANG), hang=HANG) == (0, [], [])


def test_command_line_gives_the_command_and_its_seconds(monkeypatch):
    monkeypatch.setattr(Supervisor, "run", lambda self: (self.command, self.hang_seconds))
    words = ["train", "--steps", "9", "--", "x"]
    for flags, seconds in ([], 300.0), (["--hang-seconds", "7.5"], 7.5):
        assert supervise.main([*flags, "--", *words]) == (words, seconds)
    with pytest.raises(SystemExit, match="2"):
        supervise.main(["--hang-seconds", "0", "--", *words])


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, code, failures",
    [
        ([4, 3, 4], 75, 3),
        ([None, None, None], 75, 3),
        ([6, 4, 7, 5, 8, 99], 0, 5),  # one that goes further forgives those before
        ([None, None, 3, None, 4, None, 99], 0, 6),
    ],
)
def test_three_failures_without_a_further_step_end_the_run(
    run, capfd, monkeypatch, steps, code, failures
):
    """The third try of each row has NEEDLE_SYNC; pauses double, the words to go on do not."""
    paused = []
    monkeypatch.setattr(Supervisor, "_pause", lambda self, seconds: paused.append(seconds))
    body = f"""
say(os.environ.get("NEEDLE_SYNC"), *sys.argv[1:])
step = {steps}[attempt]
if step is not None: beat(step)
sys.exit(0 if step == 99 else 75)
"""
    done, said, faults = run(body)
    assert done == code and [fault["step"] for fault in faults] == steps[:failures]
    row, reached, pauses = 0, -1, [0.0, *paused, 0.0]
    for step, words, pause in zip(steps, said, pauses):
        sync = "1" if row == 2 else "None"
        assert words == (f"{sync} --again ." if words is not said[0] else sync)
        assert pause == [0.0, 0.01, 0.02][row]
        step = -1 if step is None else step
        row, reached = row + 1 if step <= reached else 1, max(step, reached)
    ended = "ended: 3 failures without a further step"
    assert [fault["action"] for fault in faults[:-1]] == ["restart"] * (failures - 1)
    assert faults[-1]["action"] == ("restart" if code == 0 else ended)
    assert (ended in capfd.readouterr().err) == (code == 75)


def test_folder_that_cannot_be_written_ends_the_run_if_another_works_on_there(
    run, tmp_path, monkeypatch, capfd
):
    body = "if not attempt: os.unlink(PATH + '.run')\nsys.exit(75)"
    assert [fault["action"][:7] for fault in run(body)[2]] == ["restart", "ended: "]
    (tmp_path / "held").mkdir()
    lock = Lock(tmp_path / "held")
    for name, why in ("held", f"process {os.getpid()} on "), ("gone", "No such file"):
        folder = tmp_path / name
        done, said, faults = run(f"say('x'); write(PATH + '.run', {str(folder)!r}); sys.exit(75)")
        assert (done, said, faults) == (75, ["x"], [])
        assert f"supervise: {folder}" in (err := capfd.readouterr().err) and why in err
    folder = tmp_path / "held"
    assert not (folder / "faults.jsonl").exists()
    monkeypatch.setattr(supervise, "REAP_SECONDS", 30.0)
    threading.Timer(1.0, lock.release).start()  # a process of the command needs a while to end
    body = f"say('x')\nif attempt: sys.exit(0)\nwrite(PATH + '.run', {str(folder)!r}); sys.exit(75)"
    assert run(body)[:2] == (0, ["x", "x"]) and len(faults_of(folder)) == 1


# ---- signals ------------------------------------------------------------------------------------

PATIENT = """
heard = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(number))
say("ready")
while not heard:
    time.sleep(0.01)
time.sleep(0.1)
say(*[signal.Signals(number).name for number in heard])
"""


@contextlib.contextmanager
def when_said(folder, word, number):
    """Send this process a signal from a thread, once the command has said a word."""

    def wait():
        wait_for(lambda: any(word in lines_of(path) for path in folder.rglob("said")))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("code", [0, 75])
def test_signal_is_passed_on_once_and_ends_the_run(run, tmp_path, number, code):
    before = signal.getsignal(number)
    with when_said(tmp_path, "ready", number):
        done, said, _ = run(PATIENT + f"sys.exit({code})")
    assert done == code and said == ["ready", number.name]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("name", ["mpirun", "mpiexec", "orterun", "prterun"])
def test_signal_to_the_supervisor_of_mpirun_is_passed_on_as_sigusr1(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(f"#!{sys.executable} -S\n{BEGIN}{PATIENT}")
    (tmp_path / name).chmod(0o755)
    with when_said(tmp_path, "ready", signal.SIGTERM):
        assert Supervisor([str(tmp_path / name)]).run() == 0
    assert lines_of(tmp_path / "said") == ["ready", "SIGUSR1"]


def test_signal_before_a_restart_ends_the_run(run, monkeypatch):
    monkeypatch.setattr(supervise, "PAUSE", 60.0)
    recorded = Supervisor._record

    def then_signal(self, *given):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return recorded(self, *given)

    monkeypatch.setattr(Supervisor, "_record", then_signal)
    done, said, faults = run("say(attempt); sys.exit(75)")
    assert (done, said, len(faults)) == (143, ["0"], 1)


# ---- the heartbeat ------------------------------------------------------------------------------


def test_heartbeat_holds_the_steps_and_the_time_of_work(monkeypatch, tmp_path):
    monkeypatch.delenv(HEARTBEAT, raising=False)
    heartbeat.beat(1)
    path = tmp_path / "steps"
    monkeypatch.setenv(HEARTBEAT, str(path))
    heartbeat.beat()
    assert not path.exists()  # no step yet: not watched
    heartbeat.beat(0)
    assert path.read_text() == "0"
    heartbeat.beat(12)
    os.utime(path, (1, 1))
    heartbeat.beat()
    assert path.read_text() == "12" and time.time() - path.stat().st_mtime < 60
    for _ in range(2):  # it may be gone
        heartbeat.rest()
        assert not path.exists()
    path.mkdir()
    heartbeat.beat(13)  # cannot be written, and ends no training
    monkeypatch.setenv(HEARTBEAT, "")
    assert not heartbeat.supervised()
    heartbeat.rest()
