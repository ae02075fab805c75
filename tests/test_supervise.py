"""Commands that die in every way. (Trainings that do: tests/apps/test_supervised_run.py.)"""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness import ROOT

from needle import _C, supervise
from needle.supervise import Supervisor

pytestmark = pytest.mark.slow

# What the commands begin with. `say` leaves a word for the test in the folder where it runs.
BEGIN = """
import json, os, signal, sys, time
life = int(os.environ["NEEDLE_RESTARTS"])
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
    """run(code, *words) -> (exit code, supervisor, words said, lines of faults.jsonl)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEEDLE_SYNC", raising=False)
    monkeypatch.setattr(supervise, "TICK", 0.01)
    monkeypatch.setattr(supervise, "GRACE", 0.5)
    monkeypatch.setattr(supervise, "PAUSES", tuple(pause / 50 for pause in supervise.PAUSES))

    def start(code, *words, hang=30.0, device="cpu"):
        begin = BEGIN + f"beat(run='.', device={device!r}, watched=False)\n"
        one = Supervisor([sys.executable, "-S", "-c", begin + code, *words], hang)
        done = one.run()
        said, faults = tmp_path / "said", tmp_path / "faults.jsonl"
        lines = faults.read_text().splitlines() if faults.exists() else []
        return (
            done,
            one,
            said.read_text().splitlines() if said.exists() else [],
            [json.loads(line) for line in lines],
        )

    return start


# ---- what is started again ----------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 74, 76, 130])
def test_other_exit_codes_are_passed_on(run, code, capfd):
    done, _, said, faults = run(f"say('here'); sys.exit({code})")
    assert (done, said, faults) == (code, ["here"], [])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "end, wanted",
    [
        ("sys.exit(75)", {"exit": 75, "signal": None, "message": "exit code 75"}),
        ("die(signal.SIGKILL)", {"exit": None, "signal": "SIGKILL"}),
        ("sys.exit(128 + 9)", {"exit": None, "signal": "SIGKILL"}),  # of a launcher's rank
        ("die(signal.SIGSEGV)", {"exit": None, "signal": "SIGSEGV"}),
        ("die(40)", {"exit": None, "signal": "signal 40", "message": "killed by signal 40"}),
        ("die(signal.SIGTERM)", {"exit": None, "signal": "SIGTERM"}),  # not from us
    ],
)
def test_a_death_is_followed_by_a_life_with_the_words_that_were_told(run, end, wanted, capfd):
    code = f"""
say(life, *sys.argv[1:])
beat(step=3, resume=["--resume", "auto"])
if life == 0:
    beat(step=4)
    {end}
sys.exit(7)
"""
    done, one, said, faults = run(code, "--steps", "9")
    assert done == 7
    assert said == ["0 --steps 9", "1 --steps 9 --resume auto"]
    [fault] = faults
    assert fault.items() >= {**wanted, "step": 5, "op": None, "action": "restart"}.items()
    assert 0 < fault["seconds_lost"] < 20 and fault["time"].endswith("+00:00")
    err = capfd.readouterr().err.splitlines()
    assert err[-2].startswith("supervise: step 5: ") and err[-2].endswith(" s lost: restart")
    assert err[-1].startswith("supervise: 1 death, ")
    assert err[-1].endswith(" s lost (faults.jsonl)")
    assert one.lost >= fault["seconds_lost"] - 0.001


@pytest.mark.parametrize("way", ["time.sleep(60)", "die(signal.SIGSTOP)"], ids=["sleep", "stop"])
def test_a_hang_is_killed_with_its_stacks(run, way, capfd):
    code = f"""
beat(step=0)
if life == 0:
    beat(step=1)
    {way}
say(life)
"""
    done, _, said, [fault] = run(code, hang=HANG)
    assert done == 0 and said == ["1"]
    assert fault["step"] == 2 and fault["signal"] == "SIGABRT"
    assert fault["message"] == "nothing finished for 1 s"
    err = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in err and 'File "<string>", line ' in err


def test_what_ignores_the_abort_is_killed_with_its_group(run, tmp_path):
    code = """
beat(step=0)
if life == 0:
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    if os.fork() == 0:
        say(os.getpid())
    time.sleep(60)
"""
    done, _, [pid], [fault] = run(code, hang=HANG)
    assert done == 0 and fault["signal"] == "SIGKILL"
    wait_until_gone(int(pid))


def test_the_rest_of_a_dead_group_is_killed(run):
    code = """
if life == 0:
    if os.fork() == 0:
        time.sleep(60)
    say(os.getpid())
    sys.exit(75)
"""
    done, _, [leader], _ = run(code)
    assert done == 0
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.killpg(int(leader), 0)
            time.sleep(0.01)


def test_who_tells_nothing_is_not_watched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-S", "-c", "import time; time.sleep(1)"]
    assert Supervisor(command, 0.2).run() == 0


def test_what_may_take_any_time_is_not_watched(run):
    code = "beat(step=0); beat(watched=False); time.sleep(3 * float(sys.argv[1]))"
    assert run(code, str(HANG), hang=HANG)[0] == 0


def test_each_word_starts_the_clock_anew(run):
    code = "beat(step=0)\nfor step in range(6):\n    time.sleep(float(sys.argv[1])); beat()"
    assert run(code, str(HANG / 3), hang=HANG)[0] == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "\xff", '{"step": "x", "run": 3}', "[" * 9999]
)
def test_other_words_are_passed_over(run, text):
    code = f"""
with open(os.environ["NEEDLE_HEARTBEAT"], "w") as pipe:
    pipe.write({text!r} + "\\n")
beat(step=4)
sys.exit(75 if life == 0 else 0)
"""
    done, _, _, [fault] = run(code)
    assert done == 0 and fault["step"] == 5


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end, code",
    [("sys.exit(75)", 75), ("die(signal.SIGKILL)", 137), ("time.sleep(60)", 134)],
    ids=["fault", "signal", "hang"],
)
def test_three_deaths_at_one_step_are_the_end(run, end, code, capfd):
    done, one, said, faults = run(f"say(life); beat(step=0); beat(step=6); {end}", hang=HANG)
    assert done == code and said == ["0", "1", "2"] and one.deaths == 3
    assert [fault["step"] for fault in faults] == [7, 7, 7]
    ended = "ended: 3 deaths there, and nothing done beyond"
    assert [fault["action"] for fault in faults] == ["restart", "restart", ended]
    assert ended in capfd.readouterr().err


def test_three_deaths_before_the_first_step_are_the_end(run):
    done, _, said, faults = run("say(life); sys.exit(75)")
    assert done == 75 and len(said) == 3 and faults[2]["step"] is None


def test_deaths_at_other_steps_are_not_counted_together(run):
    """Each life goes a step further, and the fourth ones die on the way there twice."""
    code = """
beat(step=0)
for step in range(1, [5, 3, 2, 6, 4, 7, 8][life] + 1):
    beat(step=step)
sys.exit(75 if life < 6 else 0)
"""
    done, _, _, faults = run(code)
    assert done == 0 and [fault["step"] for fault in faults] == [6, 4, 3, 7, 5, 8]


@pytest.mark.parametrize("steps", [[4, 3, 4], [4, 4, 3], [4, 3, 3]])
def test_deaths_at_neighbouring_steps_are_counted_together(run, steps):
    """One fault of a GPU: whether the loss before it arrived in time makes a step."""
    code = f"""
beat(step=0)
for step in range(1, {steps}[life]):
    beat(step=step)
sys.exit(75)
"""
    done, _, _, faults = run(code)
    assert done == 75 and [fault["step"] for fault in faults] == steps


@pytest.mark.parametrize("end, code", [("sys.exit(75)", 75), ("die(signal.SIGKILL)", 137)])
@pytest.mark.parametrize("saved", [None, 4, "life", [9]])
def test_deaths_at_any_steps_without_a_new_checkpoint_end_the_run(run, end, code, saved, capfd):
    """Steps that grow, and a checkpoint that is saved again, are no progress."""
    once = "pass" if saved is None else f"beat(saved={saved!r})"
    done, _, said, faults = run(f"say(life); beat(step=0); beat(step=5 + 3 * life); {once}; {end}")
    count = len(supervise.PAUSES) + 1
    assert done == code and said == [str(life) for life in range(count)]
    assert [fault["step"] for fault in faults] == [6 + 3 * life for life in range(count)]
    ended = f"ended: {count} deaths without a new checkpoint"
    assert [fault["action"] for fault in faults] == ["restart"] * (count - 1) + [ended]
    err = capfd.readouterr().err
    assert ended in err and "2 deaths without a new checkpoint: waiting 0.01 s" in err


def test_new_checkpoint_forgives_deaths_and_ends_the_pauses(run, monkeypatch):
    paused = []
    monkeypatch.setattr(Supervisor, "_pause", lambda self, seconds: paused.append(seconds))
    monkeypatch.setattr(supervise, "PAUSES", (0.0, 1.0, 2.0, 4.0))
    code = """
beat(step=0)
beat(step=3 * life + 3)
if life in (2, 5):
    beat(saved=3 * life + 1)
sys.exit(75 if life < 9 else 0)
"""
    done, _, _, faults = run(code)
    assert done == 0 and [fault["action"] for fault in faults] == ["restart"] * 9
    waited = [pause for pause in paused if pause]
    assert waited == [1.0, 1.0, 2.0, 1.0, 2.0, 4.0]


def test_command_without_a_heartbeat_is_started_three_times(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "probe", lambda *arguments: None)
    code = "open('said', 'a').write('x'); import os; os.kill(os.getpid(), 9)"
    began = time.monotonic()
    assert Supervisor([sys.executable, "-S", "-c", code]).run() == 137
    assert (tmp_path / "said").read_text() == "xxx"
    assert time.monotonic() - began >= supervise.PAUSES[0] + supervise.PAUSES[1]


def test_a_hang_that_ends_well_is_a_hang(run):
    code = """
signal.signal(signal.SIGABRT, lambda *rest: os._exit(0))
beat(step=1)
time.sleep(60)
"""
    done, _, _, faults = run(code, hang=HANG)
    assert done == 75 and [fault["step"] for fault in faults] == [2, 2, 2]


def test_a_step_that_is_done_forgives_the_deaths_before(run):
    code = """
if life in (0, 1, 3, 4):
    sys.exit(75)
beat(step=0); beat(step=life)
sys.exit(75 if life == 2 else 0)
"""
    done, _, _, faults = run(code)
    assert done == 0 and [fault["step"] for fault in faults] == [None, None, 3, None, None]


@pytest.mark.parametrize("name, code", [("no-such-command", 127), ("data.txt", 126)])
def test_a_command_that_cannot_be_run(tmp_path, monkeypatch, capfd, name, code):
    (tmp_path / "data.txt").write_text("")
    assert supervise.main(["--", str(tmp_path / name)]) == code
    err = capfd.readouterr().err
    assert f"supervise: {tmp_path / name}: " in err and err.count("\n") == 1


@pytest.mark.parametrize("fifo", [False, True])
def test_a_log_that_cannot_be_written_ends_no_training(tmp_path, monkeypatch, capfd, fifo):
    monkeypatch.chdir(tmp_path)
    if fifo:
        os.mkfifo("faults.jsonl")
    else:
        os.mkdir("faults.jsonl")
    code = BEGIN + "beat(run='.', device='cpu'); sys.exit(75 if life == 0 else 0)"
    assert Supervisor([sys.executable, "-S", "-c", code]).run() == 0
    said = "it is a FIFO, not a regular file" if fifo else "Is a directory"
    assert f"supervise: faults.jsonl: {said}" in capfd.readouterr().err


# ---- the device ---------------------------------------------------------------------------------


def test_the_device_is_proved_before_each_new_start(run, monkeypatch, capfd):
    """Twice it does not come back, then it does."""
    asked = []

    def probe(device, seconds, given_up):
        asked.append(device)
        return "no answer" if len(asked) < 3 else None

    monkeypatch.setattr(supervise, "probe", probe)
    monkeypatch.setattr(supervise, "PROBE_WAITS", (0.0, 0.01, 0.02, 0.03))
    done, _, said, _ = run("say(life); sys.exit(75 if life == 0 else 0)", device="cuda:1")
    assert done == 0 and said == ["0", "1"] and asked == ["cuda:1"] * 3
    assert capfd.readouterr().err.count("cuda:1: no answer") == 2


def test_a_device_that_does_not_come_back(run, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "probe", lambda *arguments: "it fell off the bus")
    monkeypatch.setattr(supervise, "PROBE_WAITS", (0.0, 0.01))
    code = "say(life); beat(resume=['--resume', 'auto']); die(signal.SIGKILL)"
    done, _, said, [fault] = run(code, device="cuda:0")
    assert done == 75 and said == ["0"]
    assert "cuda:0 does not come back in 2 tries: it fell off the bus" in fault["action"]
    assert "--resume auto" in capfd.readouterr().err


def test_a_training_on_the_cpu_needs_no_gpu(run, monkeypatch):
    monkeypatch.setattr(supervise, "probe", None)
    assert run("sys.exit(75 if life == 0 else 0)", device="cpu")[0] == 0


def test_the_probe():
    assert supervise.probe("cpu") is None
    problem = supervise.probe("cuda:63")  # no machine has this many GPUs
    assert problem.startswith("ValueError: device cuda:63: ")


def test_a_probe_without_an_answer(monkeypatch):
    # The true one answers within 0.1 s where the machine is fast.
    monkeypatch.setattr(supervise, "PROBE", "import time; time.sleep(600)")
    assert supervise.probe("cpu", 0.01) == "no answer in 0.01 s"
    found = supervise.probe_each(["GPU-none", "GPU-neither"], 0.01)
    assert found == dict.fromkeys(["GPU-none", "GPU-neither"], "no answer in 0.01 s")
    began = time.monotonic()
    assert supervise.probe("cpu", 60, lambda: time.monotonic() > began + 0.1) is not None
    assert time.monotonic() - began < 30


@pytest.mark.cuda
def test_the_probe_of_a_gpu():
    assert supervise.probe("cuda:0") is None
    assert supervise.probe(None) is None
    uuid = _C.cuda(0).properties()["uuid"]
    found = supervise.probe_each([uuid, "GPU-none"])
    assert found[uuid] is None and "cuda:0" in found["GPU-none"]


# ---- the GPUs of several ranks ------------------------------------------------------------------

GPUS = """
beat(gpus=["A", "B", "C", "D"], ranks={"4": ["--gpus", "4"], "2": ["--gpus", "2"], "1": []})
say(os.environ.get("CUDA_VISIBLE_DEVICES"), *sys.argv[1:])
"""


@pytest.fixture
def broken(monkeypatch):
    """broken(*sets): which GPUs do not prove themselves after each death, in each of two tries."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(supervise, "PROBE_WAITS", (0.0, 0.01))
    asked = []

    def plan(*sets):
        tries = [names for names in sets for _ in range(2 if names else 1)]

        def probe_each(gpus, seconds, given_up):
            asked.append("".join(gpus))
            names = tries.pop(0)
            return {gpu: "no answer" if gpu in names else None for gpu in gpus}

        monkeypatch.setattr(supervise, "probe_each", probe_each)
        return asked

    return plan


def test_each_gpu_of_the_ranks_is_proved(run, broken):
    asked = broken("")
    done, _, said, [fault] = run(GPUS + "sys.exit(0 if life else 75)")
    assert (done, said, asked) == (0, ["None", "None"], ["ABCD"])
    assert fault["action"] == "restart" and "left_out" not in fault


def test_gpus_that_do_not_prove_themselves_are_left_out_for_good(run, broken, capfd):
    """The third that proves itself stands by, and steps in for the next that does not."""
    asked = broken("B", "", "C", "AD")
    code = GPUS + "beat(step=life)\nsys.exit(75)"
    done, one, said, faults = run(code)
    assert said == ["None", "A,C --gpus 2", "A,C --gpus 2", "A,D --gpus 2"]
    assert asked == ["ABCD", "B", "ACD", "ACD", "C", "AD", "AD"] and done == 75
    wanted = ["B", "B", "BC", "BCAD"]
    assert ["".join(fault["left_out"]) for fault in faults] == wanted
    assert faults[-1]["action"].startswith("ended: GPU 1 (B) does not prove itself: no answer; ")
    err = capfd.readouterr().err
    words = "going on with 2 of 4 GPUs, the same bits (--gpus 2)"
    assert f"supervise: GPU 1 (B) does not prove itself: no answer: {words}\n" in err
    assert err.count(words) == 2 and err.count("supervise: GPU 2 (C): no answer\n") == 2


def test_a_gpu_that_comes_back_in_a_later_try_is_kept(run, broken, monkeypatch):
    broken("")
    tries = [{"A": None, "B": "no answer", "C": None, "D": None}, {"B": None}]
    monkeypatch.setattr(supervise, "probe_each", lambda *rest: tries.pop(0))
    done, _, said, _ = run(GPUS + "sys.exit(0 if life else 75)")
    assert (done, said, tries) == (0, ["None", "None"], [])


@pytest.mark.parametrize(
    "wrong, seen, code", [("D", "A,B --gpus 2", 0), ("CA", "B,D --gpus 2", 0), ("ABCD", None, 75)]
)
def test_a_gpu_that_computed_wrong_is_left_out(run, broken, wrong, seen, code):
    """Though it proves itself; where all are in doubt nothing is started."""
    asked = broken("")
    tell = f"beat(wrong={[*wrong, 'Z']!r}, fault='step 3: GPU wrong')"
    done, _, said, [fault] = run(GPUS + f"if life == 0:\n    {tell}\n    sys.exit(75)")
    assert done == code and said == ["None", *([seen] if seen else [])]
    assert sorted(fault["left_out"]) == sorted(wrong) and fault["message"] == "step 3: GPU wrong"
    assert not asked or not {*asked[0]} & {*wrong}


def test_a_signal_while_gpus_are_proved_leaves_none_out(run, monkeypatch):
    def probe_each(gpus, seconds, given_up):
        os.kill(os.getpid(), signal.SIGTERM)
        return dict.fromkeys(gpus, "no answer")

    monkeypatch.setattr(supervise, "probe_each", probe_each)
    done, _, _, [fault] = run(GPUS + "sys.exit(75)")
    assert done == 128 + signal.SIGTERM and "left_out" not in fault


def test_gpus_that_are_not_there_do_not_prove_themselves():
    found = supervise.probe_each(["GPU-none", "GPU-neither"])
    assert [*found] == ["GPU-none", "GPU-neither"]
    assert all("cuda:0" in why for why in found.values())


# ---- NEEDLE_SYNC --------------------------------------------------------------------------------

SYNC = """
say(os.environ.get("NEEDLE_SYNC"), os.environ.get("NEEDLE_SYNC_UNTIL"))
fatal = [6, 4, 6, 9, 0][life]
beat(step=0)
if fatal:
    beat(step=fatal - 1)
    beat(fault="exp: synchronize: an illegal memory access\\nThe context is lost")
    sys.exit(75)
"""


def test_the_step_that_died_is_repeated_with_sync(run, capfd):
    """Until it is done, wherever lives before it end. Who was not synced names no op."""
    done, _, said, faults = run(SYNC)
    assert done == 0
    assert said == ["None None", "1 7", "1 7", "1 7", "1 10"]
    assert [fault["op"] for fault in faults] == [None, "exp", "exp", None]
    assert {fault["message"] for fault in faults} == {"exp: synchronize: an illegal memory access"}
    assert capfd.readouterr().err.count("The op is exp.") == 2


def test_who_wants_sync_keeps_it(run, monkeypatch):
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


def when_said(path, word, then):
    """Calls `then` from a thread, once `word` is in the file."""

    def wait():
        end = time.monotonic() + 30
        while time.monotonic() < end and not (path.exists() and word in path.read_text()):
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.usefixtures("heeds_hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("end, code", [("sys.exit(0)", 0), ("sys.exit(75)", 75)])
def test_a_signal_is_passed_on_once_and_ends_it(run, tmp_path, number, end, code):
    before = signal.getsignal(number)
    thread = when_said(tmp_path / "said", "ready", lambda: os.kill(os.getpid(), number))
    done, _, said, _ = run(PATIENT + end)
    thread.join()
    assert done == code and said == ["ready", number.name]
    assert signal.getsignal(number) is before


def test_a_signal_before_the_command_listens_ends_both(run, tmp_path):
    thread = when_said(tmp_path / "said", "0", lambda: os.kill(os.getpid(), signal.SIGTERM))
    done, one, said, faults = run("say(life); time.sleep(60)")
    thread.join()
    assert done == 128 + signal.SIGTERM and said == ["0"] and not faults and one.deaths == 0


def test_a_signal_between_two_lives_ends_it(run, monkeypatch):
    """While the next try of the device is waited for."""

    def kill(child, real=supervise.Child.kill):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return real(child)

    monkeypatch.setattr(supervise.Child, "kill", kill)
    monkeypatch.setattr(supervise, "PROBE_WAITS", (60.0,))
    done, _, said, [fault] = run("say(life); sys.exit(75)", device="cuda:0")
    assert done == 128 + signal.SIGTERM and said == ["0"] and fault["exit"] == 75
    assert fault["action"] == "ended: stopped by SIGTERM" and fault["seconds_lost"] < 30


def test_signal_in_a_pause_ends_it_at_once(run, monkeypatch):
    monkeypatch.setattr(supervise, "PAUSES", (60.0,))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    done, _, said, [fault] = run("say(life); beat(step=3); sys.exit(75)")
    assert done == 128 + signal.SIGTERM and said == ["0"] and time.monotonic() - began < 30
    assert fault["action"] == "ended: stopped by SIGTERM"


def supervised_process(folder, code, *options, hang="30", **more):
    return subprocess.Popen(
        [sys.executable, "-m", "needle.supervise", "--hang-seconds", hang]
        + ["--", sys.executable, "-S", "-c", BEGIN + "beat(device='cpu')\n" + code],
        **{"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True, **more},
    )


def said_by(folder, count, process):
    """The first `count` words that the command says."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        words = (folder / "said").read_text().split() if (folder / "said").exists() else []
        if len(words) >= count:
            return words
        assert process.poll() is None
        time.sleep(0.01)
    raise AssertionError("it says nothing")


def wait_until_gone(pid):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return  # nobody reaps it here
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} lives on")


def test_the_command_dies_with_its_supervisor_and_nothing_stays(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = "beat(step=3); say(os.getpid(), os.environ['NEEDLE_HEARTBEAT']); time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    process = supervised_process(tmp_path, code, env=environment)
    pid, pipe = said_by(tmp_path, 2, process)
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
        end = time.monotonic() + 60
        while "ready" not in (
            (tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""
        ):
            assert time.monotonic() < end
            time.sleep(0.01)
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (tmp_path / "said").read_text().split() == ["ready", "SIGINT"]
    finally:
        os.close(terminal)


def test_time_in_which_all_are_stopped_is_no_hang(tmp_path):
    code = "beat(step=0); say(os.getpid()); time.sleep(3.5); say('end')"
    process = supervised_process(tmp_path, code, hang="2.5")
    [pid] = said_by(tmp_path, 1, process)
    for number, pause in ((signal.SIGSTOP, 3), (signal.SIGCONT, 0)):
        for one in (process.pid, int(pid)):
            os.kill(one, number)
        time.sleep(pause)
    assert process.wait(60) == 0 and said_by(tmp_path, 2, process) == [pid, "end"]


def test_ctrl_z_stops_the_command_too(tmp_path):
    code = "beat(step=0); say(os.getpid()); time.sleep(60)"
    process = supervised_process(tmp_path, code)
    [pid] = said_by(tmp_path, 1, process)

    def state(one):
        with open(f"/proc/{one}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def wait_for(states):
        end = time.monotonic() + 30
        while any(state(one) not in states for one in (process.pid, int(pid))):
            assert time.monotonic() < end
            time.sleep(0.01)

    process.send_signal(signal.SIGTSTP)
    wait_for("T")
    process.send_signal(signal.SIGCONT)
    wait_for("SR")
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM


def test_ctrl_z_while_the_gpu_is_probed_waits_for_the_new_life(run, monkeypatch):
    passed, stops = [], []

    def probe(device, seconds, is_stopped):
        os.kill(os.getpid(), signal.SIGTSTP)
        stops.append(is_stopped())

    monkeypatch.setattr(supervise, "probe", probe)
    monkeypatch.setattr(Supervisor, "_pass_on", lambda self, life, number: passed.append(number))
    code = "say(life); time.sleep(0.3 * life); sys.exit(0 if life else 75)"
    done, _, said, faults = run(code, device="cuda:0")
    assert (done, said, stops, passed) == (0, ["0", "1"], [False], [signal.SIGTSTP])
    assert [fault["action"] for fault in faults] == ["restart"]


# ---- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "the following arguments are required: COMMAND"),
        (["--hang-seconds", "0", "--", "true"], "must be a number above 0, not '0'"),
        (["--hang-seconds", "nan", "--", "true"], "must be a number above 0, not 'nan'"),
        (["--hang-seconds", "inf", "--", "true"], "must be a number above 0, not 'inf'"),
        (["--hang-seconds", "soon", "--", "true"], "must be a number above 0, not 'soon'"),
    ],
)
def test_a_bad_command_line(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        supervise.main(argv)
    assert caught.value.code == 2 and said in capsys.readouterr().err
