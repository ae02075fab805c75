"""needle/distributed/control.py: ranks that meet, exchange values, and end together."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import re
import signal
import socket
import time
from multiprocessing.connection import Client

import pytest
from harness import naming, wait_for
from rank_processes import free_port

from needle.distributed import control
from needle.distributed.environment import Place
from needle.files import FileError

pytestmark = pytest.mark.slow

KEY = "the key of the tests"  # rank_processes.py's
HANG = "time.sleep(600)"
IN_GATHER = "control.gather('losses', 1)"
IN_WATCHED = f"with control.watched('losses'): {HANG}"
MEET = """
control = join()
say(control.gather("all", rank))
control.close()
"""


def met(size):
    return (0, [str([*range(size)])], "")


# ---- values -------------------------------------------------------------------------------------


def test_values_are_gathered_in_the_order_of_ranks(start):
    """Rank 0 comes first, or last."""
    body = """
control = join()
for step in range(300):
    control.step = step
    assert control.gather("x", [rank, step]) == [[other, step] for other in range(size)]
    assert control.broadcast("y", {"of": rank, "None": None}) == {"of": 0, "None": None}
assert control.gather("z", (1, "ü" * 100_000)) == [[1, "ü" * 100_000]] * size
control.close()
control.close()
say("well")
"""
    for size in (1, 2, 5):
        for rank in start(body, size):
            assert rank.end() == (0, ["well"], "")
    port = free_port()
    late = start(MEET, 3, ranks=(1, 2), port=port)
    time.sleep(0.5)
    for rank in [*start(MEET, 3, ranks=(0,), port=port), *late]:
        assert rank.end() == met(3)


def test_value_that_is_no_json_changes_nothing(start):
    """The ranks still agree after this error of one."""
    body = """
control = join()
for value in (object(), {(1, 2): 3}):
    try:
        control.gather("x", value)
    except TypeError as error:
        say(type(error).__name__)
assert control.gather("x", "y" * 3_000_000) == ["y" * 3_000_000] * size
control.close()
try:
    control.gather("x", 1)
except RuntimeError as error:
    say(error)
"""
    for rank in start(body):
        said = ["TypeError", "TypeError", "x: the control channel is closed"]
        assert rank.end() == (0, said, "")


# ---- the end of all -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", [IN_GATHER, IN_WATCHED])
@pytest.mark.parametrize("size, victim", [(3, 0), (3, 2), (2, 1)])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_missing_rank_ends_all_that_say_where_they_were(start, tmp_path, how, where, size, victim):
    """One that is killed is not waited for until the deadline. Rank 0's clock begins first. Of two
    ranks it alone can end them."""
    body = f"""
import threading
control = join()
control.step = 4
control.gather("begin", None)
control.step = 5
def enter():
    while "losses" not in control._at.where: time.sleep(0.01)
    if rank == 0: open({str(tmp_path / "zero")!r}, "w").close()
    say("ready")
threading.Thread(target=enter, daemon=True).start()
if rank == {victim}:
    say("ready")
    {HANG}
while {victim} and rank and not os.path.exists({str(tmp_path / "zero")!r}): time.sleep(0.01)
{where}
"""
    killed = how == "killed"
    ranks = start(body, size, deadline=600.0 if killed else 2.0, heard="ready")
    ranks[victim].kill(signal.SIGKILL if killed else signal.SIGSTOP)
    is_known = victim > 0 and (where is IN_GATHER or size == 2)
    missing = f"rank {victim} did" if is_known else "a rank"
    reason = rf"rank [012] waited 2 s in 'losses' at step 5: {missing}"
    reason = f"rank {victim} is gone" if killed else reason
    for number, rank in enumerate(ranks):
        if number != victim:
            code, _, said = rank.end()
            assert code == 75 and said.count("\n") == 1, said
            assert re.match(f"needle: rank {number}, in 'losses' at step 5: {reason}", said), said
    if not killed:
        ranks[victim].kill(signal.SIGCONT)
        code, _, said = ranks[victim].end()
        assert code == 75 and f"rank {victim}, after 'begin' at step 4: rank " in said


def test_time_in_which_ranks_are_stopped_does_not_count(start):
    body = """
control = join()
control.gather("begin", None)
say("ready")
if rank: time.sleep(1.0)
say(control.gather("all", rank))
control.close()
"""
    ranks = start(body, 2, deadline=4.0, heard="ready")
    time.sleep(0.6)  # rank 0 waits for the other
    for number, seconds in (signal.SIGSTOP, 4.0), (signal.SIGCONT, 0.0):
        for rank in ranks:
            rank.kill(number)
        time.sleep(seconds)
    for rank in ranks:
        assert rank.end() == (0, ["ready", "[0, 1]"], "")


def test_ranks_that_have_come_wait_for_others_longer_than_the_deadline(start):
    body = "if rank == 2: time.sleep(3.0)\n" + MEET
    for rank in start(body, 3, deadline=1.0, seconds=30.0):
        assert rank.end() == met(3)


def test_ranks_in_different_collectives_end_with_1(start):
    begin = "control = join()\ncontrol.step = 7\ncontrol.gather('losses', 1)\n"
    for body, name in [
        ("control.gather('stop' if rank == 2 else 'losses', 1)", "stop"),
        ("if rank == 2: control.close()\ncontrol.gather('losses', 1)", "the end"),
    ]:
        with naming(body):
            for rank in start(begin + body, 3, deadline=600.0):
                code, _, said = rank.end()
                assert code == 1 and f"rank 2 is in '{name}', and rank 0 in 'losses'\n" in said


@pytest.mark.parametrize("where", [IN_GATHER, IN_WATCHED])
@pytest.mark.parametrize("leaver, code", [(0, 1), (0, 75), (1, 75)])
def test_rank_that_leaves_ends_all_with_its_code(start, where, leaver, code):
    """Rank 0 prints its own reason; that of another rank is said by all."""
    body = f"""
control = join()
control.step = 3
control.gather("begin", None)
if rank == {leaver}:
    control.leave('the disk is full', {code})
    say('left')
    sys.exit({code})
{where}
"""
    ended = [rank.end() for rank in start(body, 3, deadline=600.0)]
    assert ended.pop(leaver) == (code, ["left"], "")
    for found, _, said in ended:
        assert found == code
        assert (said == "") if leaver == 0 else "rank 1 stopped at step 3: the disk is full" in said


# ---- work that takes longer than the deadline ----------------------------------------------------

WORK = """
class Work:
    def __init__(self, begun=True): self.has_begun, self.has_ended = begun, False
    def begun(self): return self.has_begun
    def done(self): return self.has_ended
class Broken(Work):
    def done(self): raise RuntimeError("the cable is out")
def enqueue(name, work):
    with control.watched(name) as collective:
        collective.goes_on(work)
    return work
control = join()
control.step = 3
control.gather("the gradients", None)
"""


NO_HANGS = {
    "collectives": """
for _ in range(3):
    with control.watched("weights"): time.sleep(0.4 * deadline)
    time.sleep(0.3 * deadline * rank)
    control.gather("x", 1)
""",
    "a patient rank": """
if rank == LATE: time.sleep(1.5 * deadline)
assert control.broadcast("the data", rank, patient=True) == 0
""",
    "a device": """
works = [enqueue("the sum", Work(begun=False)), enqueue("the weights", Work(begun=False))]
time.sleep(1.5 * deadline)
for work in works:
    work.has_begun = True
    time.sleep(0.6 * deadline)
    work.has_ended = True
""",
}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("what", NO_HANGS)
def test_work_that_is_not_late_is_no_hang(start, what, late):
    """Of a device two collectives take longer than the deadline, and before it did other work."""
    body = WORK + NO_HANGS[what].replace("LATE", str(late)) + "control.close()\nsay('well')"
    for rank in start(body, deadline=3.0):
        assert rank.end() == (0, ["well"], "")


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(
    "work, said",
    [
        ("Work()", r"rank [012] waited 2 s in 'the sum' at step 3, on its device: a rank did"),
        ("Broken()", "rank [012], in 'the sum' at step 3, on its device: the cable is out"),
    ],
)
def test_device_that_does_not_end_ends_all(start, late, work, said):
    """Main threads wait in C for a result; the device of one rank has not begun."""
    body = f"""
enqueue("the sum", Work(begun=False) if rank == {late} else {work})
{HANG}
"""
    for number, rank in enumerate(start(WORK + body, 3, deadline=2.0)):
        code, _, line = rank.end()
        assert code == 75 and line.count("\n") == 1, line
        assert re.match(f"needle: rank {number}, after 'the sum' at step 3: {said}", line), line


# ---- the start ----------------------------------------------------------------------------------


def test_rank_that_does_not_come_is_named(start):
    ended = [rank.end() for rank in start("join()", 4, ranks=(0, 2), seconds=5.0)]
    assert [code for code, _, _ in ended] == [75, 75]
    assert all("ranks 1 and 3 of 4 did not come within 5 s: " in said for _, _, said in ended)
    for given, lacks in ("min(rank, 1)", "rank 2 of 3"), ("5 * rank", "ranks 1 and 2 of 3"):
        first, *others = start(f"join(rank={given})", 3, seconds=2.0)
        code, _, said = first.end()
        assert code == 75 and f"{lacks} did not come" in said
        assert {rank.end()[0] for rank in others} == {75}
    [rank] = start("join()", 2, ranks=(1,), seconds=0.5)
    code, _, said = rank.end()
    assert code == 75 and "RankError rank 1 did not reach rank 0 at 127.0.0.1:" in said
    assert "refused" in said and "MASTER_ADDR" in said
    for place in Place(0, 2, 0, 1, "mpirun"), Place(1, 2, 0, 1, "mpirun"):
        with pytest.raises(ValueError, match="mpirun does not say where rank 0 is: set MASTER_AD"):
            control.Control.join(place, {})
    with socket.create_server(("127.0.0.1", 0)) as other:
        [first] = start(MEET, 2, ranks=(0,), port=other.getsockname()[1], seconds=1.0)
        code, _, said = first.end()
        assert code == 75 and f"rank 0 cannot listen: {os.strerror(errno.EADDRINUSE)}" in said
        assert "set another MASTER_PORT for all ranks" in said


@pytest.mark.parametrize(
    "body, size, words",
    [
        (
            'join({"needle": "0.1", "lr": "1e-3" if rank < 2 else "1e-4", "x": "y"} if rank != 1 '
            'else {"needle": "0.1", "lr": "1e-3", "z": "w"})',
            4,
            "rank 1: x is None, at rank 0 'y'",
        ),
        ("join({'lr': rank // 2})", 4, "rank 2: lr is 1, at rank 0 0"),
        ("join({'lr': 1, 'z': 2} if rank else {'lr': 1})", 2, "rank 1: z is 2, at rank 0 None"),
        ("join(size=2 + rank)", 2, "rank 1: the number of ranks is 3, at rank 0 2"),
    ],
)
def test_ranks_that_do_not_belong_together_are_named(start, body, size, words):
    codes = []
    for number, rank in enumerate(start(body, size)):
        code, _, said = rank.end()
        codes.append(code)
        assert number != 0 or words in said, said
    assert set(codes) == {1}


def connected(port: int, connect=socket.create_connection, **more):
    """Return a connection, as soon as somebody listens there."""
    opened: list = []

    def reached() -> bool:
        with contextlib.suppress(OSError):
            opened.append(connect(("127.0.0.1", port), **more))
        return bool(opened)

    wait_for(reached)
    return opened[0]


def test_strangers_claim_no_rank_and_end_no_start(start):
    """They send other bytes than a rank's, half of them, or none; have another key, or come from
    another start."""
    port = free_port()
    [first] = start(MEET, 2, ranks=(0,), port=port)
    texts = b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 300, b"\xff" * 9, b"[" * 999
    opened = [connected(port) for _ in range(20 * len(texts))]
    for one, text in zip(opened, texts * 20):
        one.sendall(text)
    strangers = [
        start(f"join({words})", 2, ranks=(1,), port=port, seconds=1.0)[0]
        for words in ("key=''", "key='the key of others'", "job='other'")
    ]
    for n, stranger in enumerate(strangers):
        code, _, said = stranger.end()
        assert code == 75 and ("another program or key" in said or n == 2), said
    for rank in [*start(MEET, 2, ranks=(1,), port=port), first]:
        assert rank.end() == met(2)
    for one in opened:
        one.close()


def test_another_key_is_named_also_after_rank_0_gave_up(start):
    port = free_port()
    [first] = start("join()", 2, ranks=(0,), port=port, seconds=1.0)
    [other] = start("join(key='other')", 2, ranks=(1,), port=port, seconds=3.0)
    assert first.end()[0] == 75
    code, _, said = other.end()
    assert code == 75 and "within 3 s: another program or key, then [Errno 111]" in said, said


def test_nothing_is_unpickled_from_one_that_has_the_key(start, tmp_path):
    """It is a rank, and sends as a value what would make a folder."""
    trap, port = f"cos\nmkdir\n(V{tmp_path}/sprung\ntR.".encode(), free_port()
    [first] = start(MEET, 2, ranks=(0,), port=port)
    with connected(port, Client, authkey=KEY.encode()) as rank:
        for sent in json.dumps(["test", 1]).encode(), trap:
            rank.send_bytes(sent)
    code, _, said = first.end()
    assert code == 75 and "rank 1 is gone" in said
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("local", [True, False])
def test_rank_0_listens_on_loopback_if_all_ranks_are_local(start, local):
    """MASTER_ADDR may be the machine's name for others. 127.0.0.2 is another address here."""
    host, port = socket.gethostname() if local else "127.0.0.1", free_port()
    key = KEY * local
    body = MEET.replace("join()", f"join(local={local}, host={host!r}, key={key!r})")
    [first] = start(body, 2, ranks=(0,), port=port)
    connected(port).close()
    for other in ["127.0.0.2", "::1"][: 1 + socket.has_dualstack_ipv6()]:
        with pytest.raises(OSError) if local else contextlib.nullcontext():
            socket.create_connection((other, port), 5).close()
    [second] = start(body, 2, ranks=(1,), port=port)
    assert second.end() == met(2)
    assert first.end()[1:] == (met(2)[1], "" if local else control.NO_KEY + "\n")


def test_key_of_a_user_is_one_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    local = Place(0, 2, 0, 2, "mpirun")
    key = control.key_of(local)
    assert key == control.key_of(local) == (tmp_path / "needle" / "ranks.key").read_text().strip()
    given = dataclasses.replace(local, key="given by the user")
    assert control.key_of(given) == "given by the user" and "given" not in repr(given)
    (tmp_path / "needle" / "ranks.key").chmod(0o644)
    with pytest.raises(FileError, match="NEEDLE_RANKS_KEY takes its place.*chmod 600"):
        control.key_of(local)
