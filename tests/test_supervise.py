"""Commands that fail in every way, under needle/supervise.py. (Trainings that do:
tests/apps/test_supervised_run.py.)"""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness import ROOT, naming, state_of, wait_for, wait_until_gone

from needle import _C, supervise
from needle.supervise import Supervisor

pytestmark = pytest.mark.slow

# Begin of each command. `say` appends words to a file of the folder where it runs.
BEGIN = """
import json, os, signal, sys, time
attempt = int(os.environ["NEEDLE_RESTARTS"])
def beat(**facts):
    with open(os.environ["NEEDLE_HEARTBEAT"], "w") as pipe:
        pipe.write(json.dumps(facts) + "\\n")
def say(*words):
    with open("said", "a") as file:
        print(*words, file=file)
def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)
"""
HANG = 0.6  # seconds


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(code, *words) -> (exit code, supervisor, words said, lines of faults.jsonl), each time in
    a folder of its own."""
    monkeypatch.delenv("NEEDLE_SYNC", raising=False)
    monkeypatch.setattr(supervise, "TICK", 0.01)
    monkeypatch.setattr(supervise, "STACK_SECONDS", 0.5)
    monkeypatch.setattr(supervise, "PAUSES", tuple(pause / 50 for pause in supervise.PAUSES))
    folders = []

    def start(code, *words, hang=30.0, device="cpu"):
        folder = tmp_path / f"run{len(folders)}"
        folders.append(folder)
        folder.mkdir()
        monkeypatch.chdir(folder)
        begin = BEGIN + f"beat(run='.', device={device!r}, watched=False)\n"
        one = Supervisor([sys.executable, "-S", "-c", begin + code, *words], hang)
        return one.run(), one, lines_of(folder / "said"), faults_of(folder)

    return start


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


def faults_of(folder):
    return [json.loads(line) for line in lines_of(folder / "faults.jsonl")]


def steps_of(faults):
    return [fault["step"] for fault in faults]


# ---- restarts -----------------------------------------------------------------------------------


def test_other_exit_codes_are_passed_on(run, capfd):
    for code in (0, 1, 74, 76, 130):
        with naming("exit code", code):
            done, _, said, faults = run(f"say('here'); sys.exit({code})")
            assert (done, said, faults) == (code, ["here"], [])
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_followed_by_a_restart_with_the_reported_flags(run, capfd):
    for end, wanted in [
        ("sys.exit(75)", {"exit": 75, "signal": None, "message": "exit code 75"}),
        ("die(signal.SIGKILL)", {"exit": None, "signal": "SIGKILL"}),
        ("sys.exit(128 + 9)", {"exit": None, "signal": "SIGKILL"}),  # of a launcher's rank
        ("die(40)", {"exit": None, "signal": "signal 40", "message": "killed by signal 40"}),
        ("die(signal.SIGTERM)", {"exit": None, "signal": "SIGTERM"}),  # not from us
    ]:
        code = f"""
say(attempt, *sys.argv[1:])
beat(step=3, resume=["--resume", "auto"])
if attempt == 0:
    beat(step=4)
    {end}
sys.exit(7)
"""
        with naming(end):
            done, one, said, [fault] = run(code, "--steps", "9")
            assert done == 7 and said == ["0 --steps 9", "1 --steps 9 --resume auto"]
            assert fault.items() >= {**wanted, "step": 5, "op": None, "action": "restart"}.items()
            assert 0 < fault["seconds_lost"] < 20 and fault["time"].endswith("+00:00")
            err = capfd.readouterr().err.splitlines()
            assert err[-2].startswith("supervise: step 5: ")
            assert err[-2].endswith(" s lost: restart")
            assert err[-1].startswith("supervise: 1 failure, ")
            assert err[-1].endswith(" s lost (faults.jsonl)")
            assert one.seconds_lost >= fault["seconds_lost"] - 0.001


def test_a_hang_is_killed_after_its_stacks(run, capfd):
    for way in ("time.sleep(60)", "die(signal.SIGSTOP)"):
        code = f"""
beat(step=0)
if attempt == 0:
    beat(step=1)
    {way}
say(attempt)
"""
        with naming(way):
            done, _, said, [fault] = run(code, hang=HANG)
            assert done == 0 and said == ["1"]
            assert (fault["step"], fault["signal"]) == (2, "SIGABRT")
            assert fault["message"] == "nothing finished for 1 s"
            err = capfd.readouterr().err
            assert "Fatal Python error: Aborted" in err and 'File "<string>", line ' in err


def test_the_process_group_is_killed(run):
    """Covers a command that ignores SIGABRT, and one that has ended."""
    for end, name in [
        ("signal.signal(signal.SIGABRT, signal.SIG_IGN); beat(step=0); time.sleep(60)", "SIGKILL"),
        ("sys.exit(75)", None),
    ]:
        code = f"""
if attempt == 0:
    if os.fork() == 0:
        time.sleep(60)
    say(os.getpid())
    {end}
"""
        with naming(end):
            done, _, [leader], [fault] = run(code, hang=HANG)
            assert done == 0 and fault["signal"] == name
            with pytest.raises(ProcessLookupError):
                for _ in range(500):
                    os.killpg(int(leader), 0)
                    time.sleep(0.01)


def test_time_without_reports_is_a_hang_only_after_a_watched_report(run, tmp_path):
    command = [sys.executable, "-S", "-c", "import time; time.sleep(1)"]
    assert Supervisor(command, 0.2).run() == 0
    for code in (
        "beat(step=0); beat(watched=False); time.sleep(3 * float(sys.argv[1]))",
        "beat(step=0)\nfor i in range(6):\n    time.sleep(float(sys.argv[1]) / 3); beat()",
    ):
        with naming(code):
            assert run(code, str(HANG), hang=HANG)[0] == 0


def test_other_lines_are_skipped(run):
    lines = ["", "{", "[]", "3", "\xff", '{"step": "x", "run": 3, "resume": 1, "gpus": 0}']
    code = f"""
for text in {lines!r}:
    with open(os.environ["NEEDLE_HEARTBEAT"], "w") as pipe:
        pipe.write(text + "\\n")
beat(step=4)
sys.exit(75 if attempt == 0 else 0)
"""
    done, _, _, [fault] = run(code)
    assert done == 0 and fault["step"] == 5


def test_a_report_that_cannot_be_used_ends_no_supervision(run, capfd):
    for report in (
        '{"gpus": ["a"], "ranks": {"two": []}}',
        '{"gpus": ["a"], "ranks": {"1": null}}',
        '{"gpus": ["a\\u0000"], "ranks": {"1": []}}',
        '{"resume": ["a\\u0000b"]}',
        '{"resume": ["\\ud800"]}',
    ):
        code = f"""
say(*sys.argv[1:])
beat(resume=["--resume", "auto"])
with open(os.environ["NEEDLE_HEARTBEAT"], "w") as pipe:
    pipe.write({report!r} + "\\n")
sys.exit(75 if attempt == 0 else 7)
"""
        with naming(report):
            done, _, said, _ = run(code)
            assert done == 7 and said == ["", "--resume auto"]
            assert "a report of the command cannot be used" in capfd.readouterr().err


# ---- the end ------------------------------------------------------------------------------------


def test_three_failures_at_one_step_end_the_run(run, capfd):
    for end, code in [("sys.exit(75)", 75), ("die(signal.SIGKILL)", 137), ("time.sleep(60)", 134)]:
        with naming(end):
            done, one, said, faults = run(
                f"say(attempt); beat(step=0); beat(step=6); {end}", hang=HANG
            )
            assert done == code and said == ["0", "1", "2"] and one.failures == 3
            assert steps_of(faults) == [7, 7, 7]
            ended = "ended: 3 failures at this step"
            assert [fault["action"] for fault in faults] == ["restart", "restart", ended]
            assert ended in capfd.readouterr().err
    done, _, said, faults = run("say(attempt); sys.exit(75)")
    assert done == 75 and steps_of(faults) == [None] * 3
    # A hang that ends with 0 is no success.
    code = "signal.signal(signal.SIGABRT, lambda *rest: os._exit(0)); beat(step=1); time.sleep(60)"
    done, _, _, faults = run(code, hang=HANG)
    assert done == 75 and steps_of(faults) == [2, 2, 2]


def test_failures_at_neighbouring_steps_count_together_until_a_step_is_reached(run):
    """A fault may show at a step or at the next, as the loss before it arrives in time or not."""
    for steps, code, count in [
        ([4, 3, 4], 75, 3),
        ([4, 4, 3], 75, 3),
        ([4, 3, 3], 75, 3),
        ([6, 4, 3, 7, 5, 8, 99], 0, 6),  # one goes further and forgives those before
        ([None, None, 3, None, None, 99], 0, 5),
    ]:
        body = f"""
steps = {steps}[attempt]
if steps is None: sys.exit(75)
for step in range(steps):
    beat(step=step)
sys.exit(75 if steps < 99 else 0)
"""
        with naming(steps):
            done, _, _, faults = run(body)
            assert done == code and steps_of(faults) == steps[:count]


def test_failures_without_a_new_checkpoint_end_the_run(run, capfd):
    """Steps that grow, and a checkpoint that is saved again, are no progress."""
    for end, code, saved in [
        ("sys.exit(75)", 75, None),
        ("die(signal.SIGKILL)", 137, "4"),
        ("sys.exit(75)", 75, "[9]"),
    ]:
        once = "" if saved is None else f"beat(saved={saved})"
        with naming(end, saved):
            body = f"say(attempt); beat(step=0); beat(step=5 + 3 * attempt); {once}\n{end}"
            done, _, said, faults = run(body)
            count = len(supervise.PAUSES) + 1
            assert done == code and len(said) == count
            assert steps_of(faults) == [6 + 3 * attempt for attempt in range(count)]
            ended = f"ended: {count} failures without a new checkpoint"
            actions = ["restart"] * (count - 1) + [ended]
            assert [fault["action"] for fault in faults] == actions
            err = capfd.readouterr().err
            assert ended in err
            assert "2 failures without a new checkpoint: waiting 0.01 s" in err


def test_a_new_checkpoint_ends_the_pauses(run, monkeypatch):
    paused = []
    monkeypatch.setattr(Supervisor, "_pause", lambda self, seconds: paused.append(seconds))
    monkeypatch.setattr(supervise, "PAUSES", (0.0, 1.0, 2.0, 4.0))
    code = """
beat(step=0)
beat(step=3 * attempt + 3)
if attempt in (2, 5):
    beat(saved=3 * attempt + 1)
sys.exit(75 if attempt < 9 else 0)
"""
    done, _, _, faults = run(code)
    assert done == 0 and [fault["action"] for fault in faults] == ["restart"] * 9
    assert [pause for pause in paused if pause] == [1.0, 1.0, 2.0, 1.0, 2.0, 4.0]


def test_a_command_without_a_heartbeat_is_started_three_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "check_device", lambda *arguments: None)
    code = "open('said', 'a').write('x'); import os; os.kill(os.getpid(), 9)"
    began = time.monotonic()
    assert Supervisor([sys.executable, "-S", "-c", code]).run() == 137
    assert (tmp_path / "said").read_text() == "xxx"
    assert time.monotonic() - began >= supervise.PAUSES[0] + supervise.PAUSES[1]


def test_a_command_that_cannot_be_run(tmp_path, capfd):
    (tmp_path / "data.txt").write_text("")
    for name, code in [("no-such-command", 127), ("data.txt", 126)]:
        assert supervise.main(["--", str(tmp_path / name)]) == code
        err = capfd.readouterr().err
        assert f"supervise: {tmp_path / name}: " in err and err.count("\n") == 1


def test_a_log_that_cannot_be_written_ends_no_training(run, capfd):
    for make, said in [
        ("os.mkfifo('faults.jsonl')", "it is a FIFO, not a regular file"),
        ("os.mkdir('faults.jsonl')", "Is a directory"),
    ]:
        folder = "if attempt == 0:\n    os.mkdir('run'); os.chdir('run'); " + make
        with naming(make):
            code = f"{folder}; os.chdir('..'); beat(run='run'); sys.exit(75)"
            assert run(code)[0] == 0
            assert f"supervise: run/faults.jsonl: {said}" in capfd.readouterr().err


# ---- health checks ------------------------------------------------------------------------------


def test_the_device_is_checked_before_each_restart(run, monkeypatch, capfd):
    asked = []

    def check(device, given_up):
        asked.append(device)
        return "no answer" if len(asked) < 3 else None

    monkeypatch.setattr(supervise, "check_device", check)
    monkeypatch.setattr(supervise, "CHECK_PAUSES", (0.0, 0.01, 0.02, 0.03))
    done, _, said, _ = run("say(attempt); sys.exit(75 if attempt == 0 else 0)", device="cuda:1")
    assert done == 0 and said == ["0", "1"] and asked == ["cuda:1"] * 3
    assert capfd.readouterr().err.count("cuda:1: no answer") == 2
    monkeypatch.setattr(supervise, "check_device", None)
    assert run("sys.exit(75 if attempt == 0 else 0)", device="cpu")[0] == 0


def test_a_device_that_does_not_come_back_ends_the_run(run, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "check_device", lambda *arguments: "it fell off the bus")
    monkeypatch.setattr(supervise, "CHECK_PAUSES", (0.0, 0.01))
    code = "say(attempt); beat(resume=['--resume', 'auto']); die(signal.SIGKILL)"
    done, _, said, [fault] = run(code, device="cuda:0")
    assert done == 75 and said == ["0"]
    assert "cuda:0 does not come back in 2 tries: it fell off the bus" in fault["action"]
    assert "--resume auto" in capfd.readouterr().err


def test_the_health_check_computes_in_fresh_processes(monkeypatch):
    assert supervise.check_device("cpu") is None
    problem = supervise.check_device("cuda:63")  # no machine has this many GPUs
    assert problem.startswith("ValueError: device cuda:63: ")
    found = supervise.check_gpus(["GPU-none", "GPU-neither"])
    assert [*found] == ["GPU-none", "GPU-neither"]
    assert all("cuda:0" in why for why in found.values())
    monkeypatch.setattr(supervise, "CHECK", "import time; time.sleep(600)")
    began = time.monotonic()
    assert supervise.check_device("cpu", lambda: time.monotonic() > began + 0.1) is not None
    assert time.monotonic() - began < 30
    monkeypatch.setattr(supervise, "CHECK_SECONDS", 0.01)
    assert supervise.check_device("cpu") == "no answer in 0.01 s"


@pytest.mark.cuda
def test_the_health_check_of_a_gpu():
    assert supervise.check_device("cuda:0") is None
    assert supervise.check_device(None) is None
    uuid = _C.cuda(0).properties()["uuid"]
    found = supervise.check_gpus([uuid, "GPU-none"])
    assert found[uuid] is None and "cuda:0" in found["GPU-none"]


# ---- the GPUs of several ranks ------------------------------------------------------------------

GPUS = """
beat(gpus=["A", "B", "C", "D"], ranks={"4": ["--gpus", "4"], "2": ["--gpus", "2"], "1": []})
say(os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:])
"""


@pytest.fixture
def broken(monkeypatch):
    """broken(*sets) -> the GPUs asked for: which fail after each failure, in each of two tries."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(supervise, "CHECK_PAUSES", (0.0, 0.01))

    def plan(*sets):
        asked, tries = [], [names for names in sets for _ in range(2 if names else 1)]

        def check_gpus(gpus, given_up):
            asked.append("".join(gpus))
            names = tries.pop(0)
            return {gpu: "no answer" if gpu in names else None for gpu in gpus}

        monkeypatch.setattr(supervise, "check_gpus", check_gpus)
        return asked

    return plan


def test_each_gpu_of_the_ranks_is_checked(run, broken, monkeypatch):
    asked = broken("")
    done, _, said, [fault] = run(GPUS + "sys.exit(0 if attempt else 75)")
    assert (done, said, asked) == (0, ["None", "None"], ["ABCD"])
    assert fault["action"] == "restart" and "left_out" not in fault
    tries = [{"A": None, "B": "no answer", "C": None, "D": None}, {"B": None}]
    monkeypatch.setattr(supervise, "check_gpus", lambda *rest: tries.pop(0))
    done, _, said, [fault] = run(GPUS + "sys.exit(0 if attempt else 75)")
    assert (done, said, tries) == (0, ["None", "None"], []) and "left_out" not in fault


def test_gpus_that_fail_their_check_are_left_out_for_good(run, broken, capfd):
    """The third good one is spare, and replaces the next that fails."""
    asked = broken("B", "", "C", "AD")
    done, one, said, faults = run(GPUS + "beat(step=attempt)\nsys.exit(75)")
    assert said == ["None", "A,C --gpus 2", "A,C --gpus 2", "A,D --gpus 2"]
    assert asked == ["ABCD", "B", "ACD", "ACD", "C", "AD", "AD"] and done == 75
    assert ["".join(fault["left_out"]) for fault in faults] == ["B", "B", "BC", "BCAD"]
    failed = "GPU 1 (B) failed its health check: no answer"
    assert faults[-1]["action"].startswith(f"ended: {failed}; ")
    err = capfd.readouterr().err
    words = "continuing with 2 of 4 GPUs, the same bits (--gpus 2)"
    assert f"supervise: {failed}: {words}\n" in err
    assert err.count(words) == 2 and err.count("supervise: GPU 2 (C): no answer\n") == 2


def test_a_gpu_that_computed_wrong_is_left_out(run, broken):
    """Its health check passes; if all GPUs are in doubt, nothing starts."""
    for wrong, seen, code in [("D", "A,B --gpus 2", 0), ("CA", "B,D --gpus 2", 0), ("ABCD", 0, 75)]:
        asked = broken("")
        report = f"beat(wrong={[*wrong, 'Z']!r}, fault='step 3: GPU wrong')"
        body = f"if attempt == 0:\n    {report}\n    sys.exit(75)"
        with naming(wrong):
            done, _, said, [fault] = run(GPUS + body)
            assert done == code and said == ["None", *([seen] if seen else [])]
            assert sorted(fault["left_out"]) == sorted(wrong)
            assert fault["message"] == "step 3: GPU wrong"
            assert not asked or not {*asked[0]} & {*wrong}


def test_a_signal_during_the_checks_leaves_no_gpu_out(run, monkeypatch):
    def check_gpus(gpus, given_up):
        os.kill(os.getpid(), signal.SIGTERM)
        return dict.fromkeys(gpus, "no answer")

    monkeypatch.setattr(supervise, "check_gpus", check_gpus)
    done, _, _, [fault] = run(GPUS + "sys.exit(75)")
    assert done == 128 + signal.SIGTERM and "left_out" not in fault


# ---- NEEDLE_SYNC --------------------------------------------------------------------------------

SYNC = """
say(os.environ.get("NEEDLE_SYNC"), os.environ.get("NEEDLE_SYNC_UNTIL"))
fatal = [6, 4, 6, 9, 0][attempt]
beat(step=0)
if fatal:
    beat(step=fatal - 1)
    beat(fault="exp: synchronize: an illegal memory access\\nThe context is lost")
    sys.exit(75)
"""


def test_the_failed_step_is_repeated_with_sync(run, monkeypatch, capfd):
    """Until it is done, wherever attempts before it end; only a synced fault names its op."""
    done, _, said, faults = run(SYNC)
    assert done == 0 and said == ["None None", "1 7", "1 7", "1 7", "1 10"]
    assert [fault["op"] for fault in faults] == [None, "exp", "exp", None]
    assert {fault["message"] for fault in faults} == {"exp: synchronize: an illegal memory access"}
    assert capfd.readouterr().err.count("The op is exp.") == 2
    monkeypatch.setenv("NEEDLE_SYNC", "1")
    done, _, said, faults = run(SYNC)
    assert done == 0 and said == ["1 None"] * 5
    assert [fault["op"] for fault in faults] == ["exp"] * 4


# ---- signals ------------------------------------------------------------------------------------

PATIENT = """
count = 0
def on_signal(number, frame):
    global count
    count += 1
    say(signal.Signals(number).name)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, on_signal)
beat(step=0)
say("ready")
while count == 0:
    time.sleep(0.01)
time.sleep(0.1)
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


@pytest.mark.usefixtures("heeds_hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("code", [0, 75])
def test_a_signal_is_passed_on_once_and_ends_the_run(run, tmp_path, number, code):
    before = signal.getsignal(number)
    with when_said(tmp_path, "ready", number):
        done, _, said, _ = run(PATIENT + f"sys.exit({code})")
    assert done == code and said == ["ready", number.name]
    assert signal.getsignal(number) is before


def test_a_signal_before_the_command_handles_it_ends_both(run, tmp_path):
    with when_said(tmp_path, "0", signal.SIGTERM):
        done, one, said, faults = run("say(attempt); time.sleep(60)")
    assert done == 128 + signal.SIGTERM and said == ["0"] and not faults and one.failures == 0


@pytest.fixture
def without_sigterm():
    """A SIGTERM that comes too late must not end the tests."""
    before = signal.signal(signal.SIGTERM, lambda *rest: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("without_sigterm")
def test_a_signal_between_two_attempts_ends_the_run(run, monkeypatch):
    """Signals come in the pause before a restart, and in that before the next health check."""
    for name, device in [("PAUSES", "cpu"), ("CHECK_PAUSES", "cuda:0")]:
        with monkeypatch.context() as patch, naming(name):
            kill = supervise.Child.kill

            def then_signal(child, kill=kill):
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
                return kill(child)

            patch.setattr(supervise.Child, "kill", then_signal)
            patch.setattr(supervise, name, (60.0,))
            done, _, said, [fault] = run("say(attempt); sys.exit(75)", device=device)
            assert done == 128 + signal.SIGTERM and said == ["0"] and fault["exit"] == 75
            assert fault["action"] == "ended: stopped by SIGTERM" and fault["seconds_lost"] < 30


def test_ctrl_z_during_a_health_check_waits_for_the_next_attempt(run, monkeypatch):
    passed, stops = [], []

    def check(device, given_up):
        os.kill(os.getpid(), signal.SIGTSTP)
        stops.append(given_up())

    monkeypatch.setattr(supervise, "check_device", check)
    monkeypatch.setattr(Supervisor, "_pass_on", lambda self, one, number: passed.append(number))
    code = "say(attempt); time.sleep(0.3 * attempt); sys.exit(0 if attempt else 75)"
    done, _, said, faults = run(code, device="cuda:0")
    assert (done, said, stops, passed) == (0, ["0", "1"], [False], [signal.SIGTSTP])
    assert [fault["action"] for fault in faults] == ["restart"]


@contextlib.contextmanager
def supervised_process(folder, code, hang="30", **environ):
    process = subprocess.Popen(
        [sys.executable, "-m", "needle.supervise", "--hang-seconds", hang]
        + ["--", sys.executable, "-S", "-c", BEGIN + "beat(device='cpu')\n" + code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said_by(folder, count):
    """The first `count` words that the command says."""
    words = lambda: " ".join(lines_of(folder / "said")).split()
    wait_for(lambda: len(words()) >= count)
    return words()


def test_the_command_ends_with_its_supervisor_and_leaves_no_file(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = "beat(step=3); say(os.getpid(), os.environ['NEEDLE_HEARTBEAT']); time.sleep(60)"
    with supervised_process(tmp_path, code, TMPDIR=str(temporary)) as process:
        pid, pipe = said_by(tmp_path, 2)
        assert os.path.exists(pipe)
        process.kill()
        process.wait()
        wait_until_gone(int(pid))
    assert not os.path.exists(pipe) and [*temporary.iterdir()] == []


def test_ctrl_c_on_a_terminal_reaches_the_command_once(tmp_path):
    """A child of a pseudo-terminal's session; the terminal sends SIGINT to its foreground group."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-S", "-c", BEGIN + "beat(device='cpu')\n" + PATIENT]
        os.execv(sys.executable, [sys.executable, "-m", "needle.supervise", "--", *command])
    try:
        assert said_by(tmp_path, 1) == ["ready"]
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert said_by(tmp_path, 2) == ["ready", "SIGINT"]
    finally:
        os.close(terminal)


def test_time_in_which_all_are_stopped_is_no_hang(tmp_path):
    code = "beat(step=0); say(os.getpid()); time.sleep(6.5); say('end')"
    with supervised_process(tmp_path, code, hang="5") as process:
        [pid] = said_by(tmp_path, 1)  # on a busy machine seconds later, which count
        for number, pause in ((signal.SIGSTOP, 6), (signal.SIGCONT, 0)):
            for one in (process.pid, int(pid)):
                os.kill(one, number)
            time.sleep(pause)
        assert process.wait(60) == 0 and said_by(tmp_path, 2) == [pid, "end"]


def test_ctrl_z_stops_the_command_too(tmp_path):
    code = "beat(step=0); say(os.getpid()); time.sleep(60)"
    with supervised_process(tmp_path, code) as process:
        both = (process.pid, int(said_by(tmp_path, 1)[0]))
        process.send_signal(signal.SIGTSTP)
        wait_for(lambda: all(state_of(one) == "T" for one in both))
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: all(state_of(one) in "SR" for one in both))
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_wrong_command_line(capsys):
    for argv, said in [
        ([], "the following arguments are required: COMMAND"),
        (["--hang-seconds", "0", "--", "true"], "must be a number above 0, not '0'"),
        (["--hang-seconds", "nan", "--", "true"], "must be a number above 0, not 'nan'"),
        (["--hang-seconds", "soon", "--", "true"], "must be a number above 0, not 'soon'"),
    ]:
        with pytest.raises(SystemExit) as caught, naming(argv):
            supervise.main(argv)
        assert caught.value.code == 2 and said in capsys.readouterr().err
