"""needle/distributed/rendezvous.py: ranks that come, that do not, that do not belong together, and
strangers at the door."""

import dataclasses
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes import free_port

from needle.distributed import environment, rendezvous
from needle.distributed.environment import Place
from needle.distributed.rendezvous import name_ranks
from needle.files import FileError

pytestmark = pytest.mark.slow

MEET = """
control = join()
say(control.gather("all", rank))
control.close()
"""


KEY = "the key of the tests"  # rank_processes.py's


def message(*words):
    return frame(json.dumps(words).encode())


def hello(port):
    """A connection that has begun as a rank does, and both nonces."""
    sock = knock(port, message("hello", "n" * 64))
    return sock, ("n" * 64, heard(sock)[1])


def heard(sock):
    (length,) = struct.unpack(">I", sock.recv(4, socket.MSG_WAITALL))
    return json.loads(sock.recv(length, socket.MSG_WAITALL))


def greeting(port, key=KEY, text=None, **changes):
    """A connection that says all that a rank says, with changes."""
    sock, nonces = hello(port)
    said = {"job": "test", "nonce": "", "rank": 1, "size": 2}
    said |= {"facts": {rendezvous.MAGIC: rendezvous.VERSION}, "who": "somebody", "id": "x"}
    text = json.dumps(said | changes) if text is None else text
    sock.sendall(message("rank", rendezvous._proof(key, "rank", *nonces, text), text))
    return sock


def frame(text):
    return struct.pack(">I", len(text)) + text


OPENED: list[socket.socket] = []  # by a test, which need not close them


@pytest.fixture(autouse=True)
def closed():
    yield
    while OPENED:
        OPENED.pop().close()


def knock(port, data):
    end = time.monotonic() + 20
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)
    OPENED.append(sock)
    sock.sendall(data)
    return sock


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_come(start, size):
    for rank in start(MEET, size):
        assert rank.end() == (0, [str(list(range(size)))], "")


def test_rank_0_comes_last(start):
    port = free_port()
    late = start(MEET, 3, ranks=(1, 2), port=port)
    time.sleep(0.5)
    for rank in [*start(MEET, 3, ranks=(0,), port=port), *late]:
        assert rank.end() == (0, ["[0, 1, 2]"], "")


def test_a_file_says_where_rank_0_is(start, tmp_path):
    """Also beside one of an older start, and it is gone when all have come."""
    old = {"job": "older", "nonce": "n", "addresses": ["127.0.0.1"], "port": 1}
    (tmp_path / "rank0.test.json").write_text(json.dumps(old))
    body = MEET.replace("join()", "join(host=None)")
    for rank in start(body, 3):
        assert rank.end() == (0, ["[0, 1, 2]"], "")
    assert not [*tmp_path.iterdir()]


def test_files_of_starts_that_were_killed_are_removed(start, tmp_path):
    """When nobody waits by them any more: not those of a start that goes on beside this one."""
    said = {"job": "another", "nonce": "n", "addresses": ["127.0.0.1"], "port": 1}
    ages = {
        "young": (said | {"seconds": 60}, 30),
        "patient": (said | {"seconds": 600}, 300),
        "stale": (said | {"seconds": 60}, 100),
        "older": (said, 1000),  # of a version that did not say how long it waits
        "foreign": ({"rank": 0}, 1000),
        "list": ([], 1000),
    }
    for name, (words, age) in ages.items():
        path = tmp_path / f"rank0.{name}.json"
        path.write_text(json.dumps(words))
        os.utime(path, (time.time() - age,) * 2)
    for rank in start(MEET.replace("join()", "join(host=None)"), 2):
        assert rank.end() == (0, ["[0, 1]"], "")
    left = sorted(path.name.split(".")[1] for path in tmp_path.iterdir())
    assert left == ["foreign", "list", "patient", "young"]


def test_the_port_is_taken(start):
    """By a program that accepts, and says nothing that a rank could mean."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        for rank in start(MEET, 2, port=other.getsockname()[1]):
            assert rank.end() == (0, ["[0, 1]"], "")


def test_a_rank_does_not_come(start, within):
    with within(10):
        ended = [rank.end() for rank in start("join()", 4, ranks=(0, 2), seconds=1.0)]
    for code, _, said in ended:
        assert code == 75 and said.startswith("RankMissing ranks 1 and 3 of 4 did not come within")
    assert ended[0] == ended[1]


def test_rank_0_does_not_come(start):
    [rank] = start("join()", 2, ranks=(1,), seconds=0.5)
    code, _, said = rank.end()
    assert code == 75 and "rank 1 did not find rank 0 within 0.5 s" in said
    assert "127.0.0.1:" in said and "refused" in said and "MASTER_ADDR" in said
    [rank] = start("join(host=None)", 2, ranks=(1,), seconds=0.5)
    code, _, said = rank.end()
    assert code == 75 and "wrote no address (its file is" in said


def test_facts_that_differ(start):
    body = 'join({"needle": "0.1", "lr": "1e-3" if rank < 2 else "1e-4", "x": "y"} if rank != 1 '
    body += 'else {"needle": "0.1", "lr": "1e-3", "z": "w"})'
    ended = [rank.end() for rank in start(body, 4)]
    assert len({(code, said) for code, _, said in ended}) == 1
    code, _, said = ended[0]
    assert code == 1 and said == (
        "RanksDiffer rank 1: x is not there, at rank 0 'y', z is 'w', at rank 0 not there; "
        "ranks 2 and 3: lr is '1e-4', at rank 0 '1e-3'\n"
    )


def test_two_claim_a_rank(start):
    ended = [rank.end() for rank in start("join(rank=min(rank, 1))", 3)]
    for code, _, said in ended:
        assert code == 1 and "RanksDiffer rank 1 is claimed by process" in said
        assert said.count(" and by process") == 1 and said == ended[0][2]


def test_another_size(start):
    ended = [rank.end() for rank in start("join(size=2 + rank)", 2)]
    for code, _, said in ended:
        assert code == 1 and "was started as one of 3 ranks, rank 0 as one of 2" in said


def test_another_job_is_none_of_ours(start):
    """It does not count, and finds nobody."""
    port = free_port()
    ours = start(MEET, 2, ranks=(0,), port=port)
    [other] = start("join(job='other')", 2, ranks=(1,), port=port, seconds=1.0)
    code, _, said = other.end()
    assert code == 75 and "another start" in said
    for rank in [*start(MEET, 2, ranks=(1,), port=port), *ours]:
        code, words, said = rank.end()
        assert (code, words) == (0, ["[0, 1]"]) and (not said or "another start" in said)


def test_strangers_cost_nothing(start):
    """They neither hold up nor end ours, with what they say, half of it, too much, or nothing."""
    port = free_port()
    [first] = start(MEET, 3, ranks=(0,), port=port)
    proof = message("rank", "0" * 64, "{}")
    strangers = [
        knock(port, data)
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)) * 300,
            message("hello"),
            message("hello", None),
            message("hello", "n", "n"),
            message("hello", "n")[:-2],
            message("hello", "n") + proof,
            message("at", 1, "x", 1, "gather", 1, 1, "x", 1, "", 1),
            message("end", "differ", "go home", 1),
            proof,
            b"\0\0",  # half a length
            frame(b"[" * 100_000),
            frame(b"\xff\xfe"),
            frame(b"null"),
            frame(b"7"),
            struct.pack(">I", 1 << 31),
        )
    ]
    strangers += [
        greeting(port, rank="1"),
        greeting(port, rank=True),
        greeting(port, rank=0),
        greeting(port, rank=-1),
        greeting(port, rank=2, size=2),
        greeting(port, facts=[]),
        greeting(port, facts={"x": 1}),
        greeting(port, nonce="of another start"),
        greeting(port, more=1),
        greeting(port, text="null"),
        greeting(port, text="[" * 100_000),
    ]
    gone = greeting(port, size=3)  # a rank, as it seems, that dies before all are there
    gone.close()
    time.sleep(0.2)
    others = start(MEET, 3, ranks=(1, 2), port=port)
    code, words, said = first.end()
    assert (code, words) == (0, ["[0, 1, 2]"])
    assert said.startswith("needle: rank 0 dropped ") and said.count("\n") == 1
    assert " connections of strangers: 127.0.0.1: " in said
    for rank in others:
        assert rank.end() == (0, ["[0, 1, 2]"], "")


@pytest.mark.parametrize("key", ["", "the key of others", None])
def test_a_stranger_without_the_key_claims_no_rank(start, key, monkeypatch, tmp_path):
    """Job, rank and size are those of the start; None: the key is the user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    port = free_port()
    body = MEET if key is not None else MEET.replace("join()", "join(key='')")
    [first] = start(body, 2, ranks=(0,), port=port)
    claims = [
        greeting(port, key or "", **changes)
        for changes in ({}, {"size": 3}, {"facts": {"x": "y"}}, {"rank": 0})
    ]
    for claim in claims:
        assert heard(claim) == ["stranger", rendezvous.OTHER_KEY]
        assert claim.recv(1) == b""
    [second] = start(body, 2, ranks=(1,), port=port)
    code, words, said = first.end()
    assert (code, words) == (0, ["[0, 1]"]) and "another NEEDLE_RANKS_KEY (4 times)" in said
    assert second.end() == (0, ["[0, 1]"], "")


def test_several_machines_without_a_key_are_warned_once(start):
    """By rank 0, and the start goes on."""
    body = MEET.replace("join()", "join(local=False, key='')")
    first, second = (rank.end() for rank in start(body))
    assert first[:2] == second[:2] == (0, ["[0, 1]"]) and second[2] == ""
    assert first[2] == rendezvous.NO_KEY + "\n" and first[2].count("\n") == 1
    assert "NEEDLE_RANKS_KEY" in first[2] and "export it on all machines" in first[2]
    [command] = re.findall("python -c '(.*?)'", first[2])
    made = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout
    environ = {"RANK": "0", "WORLD_SIZE": "2", "NEEDLE_RANKS_KEY": made.strip()}
    assert environment.find(environ).key == made.strip()
    assert [rank.end()[2] for rank in start(body.replace("''", repr(made.strip())))] == ["", ""]


def test_proof_of_one_connection_is_none_in_another(start):
    port = free_port()
    [first] = start(MEET, 2, ranks=(0,), port=port)
    sock, nonces = hello(port)
    again, _ = hello(port)
    again.sendall(message("rank", rendezvous._proof(KEY, "rank", *nonces, "{}"), "{}"))
    assert heard(again) == ["stranger", rendezvous.OTHER_KEY]
    [second] = start(MEET, 2, ranks=(1,), port=port)
    assert first.end()[0] == second.end()[0] == 0


def test_more_strangers_than_descriptors_do_not_delay_the_start(start, within):
    port = free_port()
    [first] = start(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + MEET,
        2, ranks=(0,), port=port,
    )  # fmt: skip
    for _ in range(400):
        knock(port, b"")
    with within(6):
        [second] = start(MEET, 2, ranks=(1,), port=port)
        assert second.end() == (0, ["[0, 1]"], "")
        assert first.end()[0] == 0


@pytest.mark.parametrize(
    "answer",
    [
        ["heard", None],
        ["heard", True],
        ["heard", -1],
        ["heard", 1e400],
        ["heard"],
        ["welcome", 1],
        ["stranger", None],
        ["missing", "go home"],
        ["proof", None, None],
        ["unheard of", 1],
        [["heard"], 1],
        {"heard": 1},
        None,
    ],
)
@pytest.mark.parametrize("when", ["first", "behind a proof"])
def test_forged_answers_end_no_rank(start, answer, when):
    """A rank goes on looking for rank 0 at the next port."""
    with socket.create_server(("127.0.0.1", 0)) as forger:
        port = forger.getsockname()[1]
        [second] = start(MEET, 2, ranks=(1,), port=port)
        with forger.accept()[0] as sock:
            _, nonce = heard(sock)
            if when != "first":
                proof = rendezvous._proof(KEY, "rank 0", nonce, "n")
                sock.sendall(message("proof", "n", proof))
                assert heard(sock)[0] == "rank"
            sock.sendall(frame(json.dumps(answer).encode()))
            forger.close()
            [first] = start(MEET, 2, ranks=(0,), port=port)
            assert second.end() == (0, ["[0, 1]"], "")
            assert first.end()[:2] == (0, ["[0, 1]"])


def test_a_forged_file_ends_no_rank(start, tmp_path):
    path = tmp_path / "rank0.test.json"
    said = {"job": "test", "nonce": "n", "addresses": ["127.0.0.1"], "port": 1}
    for wrong in ({"port": 99999}, {"port": "1"}, {"addresses": [1, None]}, {"nonce": None}, None):
        path.write_text("[" * 100_000 if wrong is None else json.dumps(said | wrong))
        body = MEET.replace("join()", "join(host=None)")
        [second] = start(body, 2, ranks=(1,))
        time.sleep(0.2)
        [first] = start(body, 2, ranks=(0,))
        assert second.end() == first.end() == (0, ["[0, 1]"], ""), wrong


@pytest.mark.parametrize("local", [True, False])
def test_rank_0_listens_on_loopback_where_all_ranks_are_local(start, local):
    """MASTER_ADDR may be the machine's name for others."""
    body = MEET.replace("join()", f"join(local={local}, host={{}})")
    port = free_port()
    host = repr(socket.gethostname()) if local else "'127.0.0.1'"
    [first] = start(body.format(host), 2, ranks=(0,), port=port)
    knock(port, b"").close()
    found = {
        bytes.fromhex(line.split()[1].partition(":")[0])
        for path in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(path).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    assert found and found <= ({bytes([1, 0, 0, 127])} if local else {bytes(4), bytes(16)})
    [second] = start(body.format(host), 2, ranks=(1,), port=port)
    assert second.end() == (0, ["[0, 1]"], "") and first.end()[:2] == (0, ["[0, 1]"])


def test_the_key_of_a_user_is_made_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    local, spread = Place(0, 2, 0, 2, "mpirun"), Place(0, 2, 0, 1, "mpirun")
    key = rendezvous.key_of(local)
    assert len(key) >= 40 and key == rendezvous.key_of(local)
    assert (tmp_path / "needle" / "ranks.key").stat().st_mode & 0o777 == 0o600
    assert rendezvous.key_of(spread) == ""
    given = dataclasses.replace(local, key="given by the user")
    assert rendezvous.key_of(given) == "given by the user" and "given" not in repr(given)
    (tmp_path / "needle" / "ranks.key").chmod(0o644)
    with pytest.raises(FileError, match="NEEDLE_RANKS_KEY takes its place.*chmod 600"):
        rendezvous.key_of(local)


def test_a_rank_that_comes_again_counts_once(start):
    port = free_port()
    [first] = start("join()", 3, ranks=(0,), port=port, seconds=1.5)
    before, again = greeting(port, size=3), greeting(port, size=3)
    code, _, said = first.end()
    assert code == 75 and "rank 2 of 3 did not come" in said
    before.close(), again.close()


def test_an_ipv6_address(start):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no ::1 here")
    for rank in start(MEET.replace("join()", "join(host='::1', local=False)"), 2):
        assert rank.end() == (0, ["[0, 1]"], "")


def test_nothing_says_where_rank_0_is():
    place = Place(0, 2, 0, 2, "mpirun")
    with pytest.raises(ValueError, match="mpirun does not say where rank 0 is: set MASTER_ADDR"):
        rendezvous.meet(place, {}, None, 1.0, 1.0)


def test_ports_end_where_ports_end():
    assert rendezvous.ports(29500) == list(range(29500, 29508))
    assert sorted(rendezvous.ports(65535)) == list(range(65528, 65536))
    assert rendezvous.ports(65535)[0] == 65535


def test_all_ports_are_taken(monkeypatch):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "PORTS", 1)
        for local in ((0, 2), (0, 1)):
            place = Place(0, 2, *local, "torchrun", "127.0.0.1", port, key=KEY)
            with pytest.raises(OSError, match="another MASTER_PORT"):
                rendezvous.meet(place, {}, None, 0.1, 1.0)


def test_names_of_ranks():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([0, 3]) == "ranks 0 and 3"
    assert name_ranks([1, 2, 5]) == "ranks 1, 2 and 5"
    assert name_ranks(list(range(99)), 2) == "ranks 0, 1 and 97 more"
