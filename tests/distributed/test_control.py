"""needle/distributed/control.py: what ranks exchange, and which rank is named as missing, killed,
stopped or late, in a gather and in a collective that hangs in C."""

import re
import signal
import time

import pytest
from harness import naming
from rank_processes import within

pytestmark = pytest.mark.slow

# A rank that stands for one in NCCL: its main thread sleeps where no exception reaches it.
HANG = "time.sleep(600)"
IN_GATHER = "control.gather('losses', rank)"
IN_WATCHED = f"with control.watched('weights'): {HANG}"
# How long a rank that leaves waits for rank 0's last words, where a test is not about that.
PATIENT = "sys.modules['needle.distributed.control'].LINGER = 20.0"


def waited_long(said, where="", deadline=2.0):
    """True if the message gives a wait of almost the deadline."""
    found = re.search(rf"waited ([\d.]+) s in {where}", said)
    return found is not None and 0.8 * deadline <= float(found[1]) <= 1.2 * deadline


# ---- values -------------------------------------------------------------------------------------


def test_values_arrive_as_they_were(start):
    body = """
control = join()
values = [0.1, 5e-324, 1.7976931348623157e308, float("inf"), -0.0, 2**70, None, "ü\\n"]
for number in range(200):
    got = control.gather("values", [rank, number, *values])
    assert repr(got) == repr([[r, number, *values] for r in range(3)])
nan = control.gather("nan", (float("nan"), {1: True}))
assert all(str(one) == "[nan, {'1': True}]" for one in nan) and len(nan) == 3
assert control.broadcast("name", f"of rank {rank}") == "of rank 0"
big = "x" * 1_000_000
assert control.gather("big", big) == [big] * 3
with control.watched("weights"):
    pass
say("well")
control.close()
control.close()
"""
    for rank in start(body, 3):
        assert rank.end() == (0, ["well"], "")
    body = """
control = join()
assert control.gather("x", (1,)) == [[1]] and control.broadcast("x", 2) == 2
with control.watched("x"):
    pass
control.leave("done")
"""
    [rank] = start(body, 1)
    assert rank.end() == (0, [], "")


def test_refused_calls_change_nothing(start):
    """Too large, no JSON: an error of this rank, after which the ranks still agree."""
    body = """
control = join()
for value in ("x" * 1_100_000, object(), {(1, 2): 3}):
    try:
        control.gather("x", value)
    except (ValueError, TypeError) as error:
        say(str(error)[:36])
assert control.gather("x", 1) == [1, 1]
control.close()
try:
    control.gather("x", 1)
except RuntimeError as error:
    say(error)
"""
    for rank in start(body):
        code, words, said = rank.end()
        assert (code, said) == (0, "") and words[0] == "x: 1,100,002 bytes: the control chan"
        assert "Object of type object is not" in words[1]
        assert words[3] == "x: the control channel is closed"


# ---- failures -----------------------------------------------------------------------------------


def test_ranks_in_different_collectives(start):
    """Without the check they would wait for each other until the deadline."""
    begin = "control = join()\ncontrol.step = 7\ncontrol.gather('losses', 1)\n"
    for body, there in [
        ("control.gather('stop' if rank == 2 else 'losses', 1)", "in 'stop' at step 7"),
        (f"if rank != 2: control.gather('losses', 1)\n{IN_WATCHED}", "in 'weights' at step 7"),
    ]:
        with naming(body), within(15):
            for rank in start(begin + body, 3, deadline=20.0):
                code, _, said = rank.end()
                assert code == 1 and "number 2 of each" in said
                assert "the ranks are at different collectives: rank 2 is " + there in said
                assert "in 'losses' at step 7" in said


@pytest.mark.parametrize("where", [IN_GATHER, IN_WATCHED])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["killed", "stopped", "late"])
def test_a_missing_rank_is_named(start, how, where, victim):
    """One that is late lives, does something else, and hears of it when it comes."""
    wait = HANG if how != "late" else "while control._failure is None: time.sleep(0.01)"
    body = f"""
control = join()
control.step = 4
control.gather("begin", None)
control.step = 5
say("ready")
if rank == {victim}:
    {wait}
{where}
"""
    ranks = start(body, 3, deadline=20.0 if how == "killed" else 2.0, heard="ready")
    if how != "late":
        ranks[victim].kill(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    with within(8):  # for one that is killed not at the deadline
        others = [rank for number, rank in enumerate(ranks) if number != victim]
        ended = [rank.end() for rank in (ranks if how == "late" else others)]
    for code, _, said in ended:
        assert code == 75 and said.count("\n") == 1 and "at step 5: rank" in said
        assert f"in '{'losses' if where is IN_GATHER else 'weights'}'" in said
        if how == "killed":
            assert f"rank {victim} is gone: its connection ended" in said
        elif how == "stopped":
            assert waited_long(said) and f"rank {victim}" in said and "does not answer for" in said
            assert "stopped, or its machine is gone" in said
        else:
            assert waited_long(said) and f"rank {victim} has not come (for" in said
            assert "after 'begin' at step 4" in said


@pytest.mark.parametrize("where", [IN_GATHER, IN_WATCHED])
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("code", [1, 75, None])
def test_a_rank_that_ends_is_named_with_its_reason(start, where, leaver, code):
    """Code None closes in order, and too early."""
    end = "control.close()" if code is None else f"control.leave('the disk is full', {code})"
    body = f"""
control = join()
control.step = 3
control.gather("begin", None)
if rank == {leaver}:
    {end}
    sys.exit({code or 0})
{where}
"""
    with within(10):
        ended = [rank.end() for rank in start(body, 3, deadline=30.0)]
    assert ended[leaver][0] == (code or 0)
    for rank in {0, 1, 2} - {leaver}:
        found, _, said = ended[rank]
        if code is None:
            assert found == 75 and f"rank {leaver} has ended, after 'begin'" in said
        else:
            assert found == code and f"rank {leaver} stopped at step 3: the disk is full" in said


def test_all_come_and_the_transfer_hangs(start):
    for rank in start(f"control = join()\n{IN_WATCHED}", 3, deadline=1.0):
        code, _, said = rank.end()
        assert code == 75 and "all ranks have come, so that the transfer itself hangs" in said


def test_a_rank_outside_of_collectives_is_not_interrupted(start):
    """The rank finishes its work, and raises at the next collective."""
    body = """
control = join()
control.gather("begin", None)
if rank == 1: os._exit(3)
time.sleep(1)
say("through")
with control.watched("weights"): say("never")
"""
    zero, one = start(body)
    code, words, said = zero.end()
    assert (code, words) == (75, ["through"]) and "rank 1 is gone" in said
    assert one.end()[0] == 3


# A rank whose stderr takes nothing more: its end waits for it for a second.
FULL_STDERR = """
control = join()
control.gather("begin", None)
os.set_blocking(2, False)
try:
    while True: os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
"""


def test_a_rank_that_goes_on_while_it_is_ended_tells_nothing_more(start):
    """A collective may return after the thread has decided to end the process: the failure is told
    once, by the thread."""
    body = f"""
import threading
decided, end = threading.Event(), Control._exit
Control._exit = lambda self, at: (decided.set(), end(self, at))
{FULL_STDERR}
with control.watched('weights'):
    say("ready")
    decided.wait()
try:
    control.gather("losses", rank)
except Exception:
    say("raised")
"""
    zero, one = start(body, heard="ready")
    one.process.kill()
    assert zero.process.wait(20) == 75  # before its output is read
    assert zero.end()[1] == ["ready"]


def test_a_stderr_that_is_not_read_delays_no_end(start):
    body = f"""
{FULL_STDERR}
with control.watched('weights'):
    say("ready")
    {HANG}
"""
    zero, one = start(body, heard="ready")
    one.process.kill()
    with within(10):
        assert zero.process.wait(20) == 75


# ---- no failures --------------------------------------------------------------------------------


def test_a_collective_within_the_deadline_is_no_hang(start):
    """Nor one that others have left, closed and ended after."""
    body = """
control = join()
for _ in range(3):
    with control.watched("weights"): time.sleep(0.6)
    time.sleep(1.5 * rank)
    control.gather("x", 1)
with control.watched("weights"): time.sleep(0.3 * rank)
say("well")
control.close()
"""
    for rank in start(body, deadline=2.0):
        assert rank.end() == (0, ["well"], "")


def test_a_stop_of_all_is_no_hang(start):
    """Ctrl-Z and fg: time in which a rank did not run is not counted."""
    body = """
control = join()
with control.watched("weights"):
    time.sleep(0.5)
    say("ready")
    for _ in range(10): time.sleep(0.1)  # not over after the stop
say("well")
control.close()
"""
    ranks = start(body, deadline=4.0, heard="ready")
    for rank in ranks:
        rank.kill(signal.SIGSTOP)
    time.sleep(5)
    for rank in ranks:
        rank.kill(signal.SIGCONT)
    for rank in ranks:
        assert rank.end() == (0, ["ready", "well"], "")


@pytest.mark.parametrize("late", [0, 1])
def test_a_patient_rank_waits_for_one_that_answers(start, late):
    body = f"""
control = join()
if rank == {late}: time.sleep(2.5 * deadline)
assert control.broadcast("the data", rank, patient=True) == 0
say("well")
control.close()
"""
    for rank in start(body, 3, deadline=1.0):
        assert rank.end() == (0, ["well"], "")


def test_a_patient_rank_does_not_wait_for_one_that_is_stopped(start):
    body = """
control = join()
say("joined")
if rank == STOPPED: time.sleep(600)
control.broadcast("the data", rank, patient=True)
"""
    for stopped in (0, 1):
        ranks = start(body.replace("STOPPED", str(stopped)), 2, deadline=1.0, heard="joined")
        ranks[stopped].kill(signal.SIGSTOP)
        code, _, said = ranks[1 - stopped].end()
        ranks[stopped].kill()
        assert code == 75 and f"rank {stopped}" in said and "does not answer" in said


# ---- the reason of rank 0 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason, told",
    [
        ('"the flags are wrong"', True),
        ('f"the flags of {rank} are wrong"', False),
        ('"wrong, " * 1000', True),
        ('"out of memory" if rank else "the disk is full"', False),
    ],
)
def test_a_rank_that_leaves_for_rank_0_s_reason_is_told_so(start, reason, told):
    """Includes a rank that comes later, and hears only the quoted reason."""
    body = f"""
control = join()
control.gather("begin", None)
{PATIENT}
if rank == 2: time.sleep(0.5)
say(control.leave({reason}))
"""
    for rank in start(body, 3)[1:]:
        assert rank.end() == (0, [str(told)], "")


def test_ranks_that_follow_one_that_left_are_told_that_rank_0_says_so(start):
    """Ranks add where they were. (The one that left may be gone before rank 0 says it.)"""
    for late in (0.0, 0.6):
        body = f"""
control = join()
control.gather("all have started", None)
if rank == 2:
    control.leave("the disk is full")
else:
    {PATIENT}
    time.sleep({late})
    try: control.gather("begin", None)
    except RankMissing as error: say(control.leave(str(error)))
"""
        assert start(body, 3, deadline=4.0)[1].end() == (0, ["True"], "")


def test_a_rank_that_leaves_waits_a_second_for_rank_0_s_reason(start):
    """Includes a rank 0 that leaves long after it saw this rank go. If rank 0 neither leaves nor
    closes, the rank is told that rank 0 does not say it."""
    body = f"""
{PATIENT}
control = join()
control.gather("all have started", None)
if rank == 0:
    while control._members[1].is_open: time.sleep(0.01)
    control.leave("the flags are wrong")
else: say(control.leave("the flags are wrong"))
"""
    with within(10):
        assert start(body, deadline=4.0)[1].end() == (0, ["True"], "")
    body = """
control = join()
if rank == 1:
    say(control.leave("the disk is full"))
    control.close()
    control._thread.join()
    control.close()
    say("closed")
else: time.sleep(60)
"""
    with within(10):
        assert start(body, deadline=4.0)[1].end() == (0, ["False", "closed"], "")


# ---- collectives that go on in a device ----------------------------------------------------------

# Work of a device that begins and ends so many seconds from now, or raises.
WORK = """
class Work:
    def __init__(self, begins, ends):
        self.begins, self.ends = (time.monotonic() + seconds for seconds in (begins, ends))
    def begun(self): return time.monotonic() >= self.begins
    def done(self): return time.monotonic() >= self.ends
class Broken(Work):
    def done(self): raise RuntimeError("the cable is out")
def enqueue(name, work):
    with control.watched(name) as collective:
        collective.goes_on(work)
NEVER = 10**6
control = join()
control.step = 3
control.gather("the gradients", None)
"""


def ended(start, body, size=3, **more):
    return [rank.end() for rank in start(WORK + body, size, **more)]


def test_work_of_a_device_is_not_waited_for(start):
    """The work takes longer than the deadline of two seconds."""
    body = """
began = time.monotonic()
for number in range(3):
    enqueue("the sum", Work(0.0, 0.3 * (number + 1)))
say(time.monotonic() - began < 0.2)
time.sleep(1.5)
assert not control._enqueued and control._own.device.at[:3] == (4, "the sum", 3)
control.gather("losses", None)
enqueue("the sum", Work(4.0, 4.5))
enqueue("the weights", Work(4.5, 5.0))
time.sleep(6)
control.close()
"""
    assert ended(start, body) == [(0, ["True"], "")] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_device_that_does_not_come_is_named(start, late):
    """Main threads wait in C for a result of the device."""
    body = f"""
enqueue("the sum", Work(NEVER if rank == {late} else 0, NEVER))
{HANG}
"""
    with within(8):
        found = ended(start, body)
    for code, _, said in found:
        assert code == 75 and said.count("\n") == 1, said
        assert waited_long(said, "'the sum' at step 3"), said
        assert f"rank {late} has not come (for " in said, said
        assert "s its device is after 'the gradients' at step 3)" in said, said


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_does_not_come_to_a_device_s_collective_is_named(start, late):
    body = f"""
if rank == {late}:
    while control._failure is None: time.sleep(0.01)
    sys.exit(control._failure.code)
enqueue("the sum", Work(0, NEVER))
{HANG}
"""
    with within(8):
        found = ended(start, body)
    for code, _, said in found[:late] + found[late + 1 :]:
        assert code == 75 and f"rank {late} has not come (for " in said, said
        assert "s it is after 'the gradients' at step 3)" in said, said
    assert found[late][0] == 75


def test_all_devices_hang_together(start):
    with within(8):
        found = ended(start, f"enqueue('the sum', Work(0, NEVER))\n{HANG}")
    for code, _, said in found:
        assert code == 75 and "all ranks have come, so that the transfer itself hangs" in said


@pytest.mark.parametrize("victim", [0, 2])
def test_a_failure_while_devices_wait_ends_all_before_the_deadline(start, victim):
    body = f"enqueue('the sum', Work(0, NEVER))\nsay('ready')\n{HANG}"
    ranks = start(WORK + body, 3, deadline=20.0, heard="ready")
    ranks[victim].kill()
    with within(10):
        found = [rank.end() for number, rank in enumerate(ranks) if number != victim]
    for code, _, said in found:
        assert code == 75 and f"in 'the sum' at step 3: rank {victim} is gone" in said, said
    body = f"""
enqueue("the sum", Broken(0, NEVER) if rank == {victim} else Work(0, NEVER))
{HANG}
"""
    with within(10):
        found = ended(start, body, deadline=20.0)
    for code, _, said in found:
        assert code == 75 and f"rank {victim}, in 'the sum' at step 3: the cable is out" in said


def test_a_rank_can_end_by_itself_while_its_device_hangs(start):
    """The rank waits for rank 0 less than its grace; a gather raises meanwhile."""
    body = f"""
if rank == 0: time.sleep(60)
{PATIENT}
enqueue("the sum", Work(0, NEVER))
say(control.leave("the disk is full", 7))
os._exit(7)
"""
    ranks = start(WORK + body, deadline=40.0)
    assert ranks[1].end() == (7, ["False"], "")
    body = """
enqueue("the sum", Work(0, NEVER))
control.gather("all have enqueued it", None)
if rank == 2: control.leave("the disk is full")
else:
    try: control.gather("losses", None)
    except RankMissing as error:
        say(str(error).partition(": ")[2])
        os._exit(error.code)
"""
    for code, words, said in ended(start, body, deadline=60.0)[:2]:
        assert (code, words, said) == (1, ["rank 2 stopped at step 3: the disk is full"], "")
