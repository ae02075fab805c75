"""needle/distributed/rendezvous.py: ranks that come, that do not, that do not belong together, and
connections of strangers."""

import dataclasses
import json
import re
import socket
import time
from pathlib import Path

import pytest
from harness import naming, python
from rank_processes import free_port, within

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
OWN = b"n" * rendezvous.NONCE


def met(size):
    return (0, [str(list(range(size)))], "")


@pytest.fixture
def connect():
    """connect(port, data) -> a connection that has sent the data; closed after the test."""
    opened: list[socket.socket] = []

    def to(port, data=b""):
        end = time.monotonic() + 20
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=5)
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.02)
        opened.append(sock)
        sock.sendall(data)
        return sock

    yield to
    for sock in opened:
        sock.close()


def claim(sock, key=KEY, replayed=None, job="test", size=2):
    """Say all that rank 1 says after its nonce. Return the proof."""
    answer = sock.recv(rendezvous.NONCE + rendezvous.PROOF, socket.MSG_WAITALL)
    proof = rendezvous._proof(key, "rank", OWN + answer[: rendezvous.NONCE])
    greeting = json.dumps(["rank", job, 1, size, {}, "somebody"]).encode() + b"\n"
    sock.sendall((replayed or proof) + greeting)
    return proof


def test_all_come(start):
    for size in (1, 2, 4):
        for rank in start(MEET, size):
            assert rank.end() == met(size)
    port = free_port()
    late = start(MEET, 3, ranks=(1, 2), port=port)
    time.sleep(0.5)
    for rank in [*start(MEET, 3, ranks=(0,), port=port), *late]:
        assert rank.end() == met(3)


def test_a_file_says_where_rank_0_is(start, tmp_path):
    """A file of an older start is replaced; the file is gone when all have come."""
    old = {"job": "older", "addresses": ["127.0.0.1"], "port": 1}
    (tmp_path / "rank0.test.json").write_text(json.dumps(old))
    for rank in start(MEET.replace("join()", "join(host=None)"), 3):
        assert rank.end() == met(3)
    assert not [*tmp_path.iterdir()]


def test_the_port_is_taken(start, monkeypatch):
    """Another program accepts there, and sends nothing that a rank would."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        for rank in start(MEET, 2, port=other.getsockname()[1]):
            assert rank.end() == met(2)
    assert rendezvous.ports(29500) == list(range(29500, 29508))
    assert sorted(rendezvous.ports(65535)) == list(range(65528, 65536))
    assert rendezvous.ports(65535)[0] == 65535
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(rendezvous, "PORTS", 1)
        for local in ((0, 2), (0, 1)):
            place = Place(0, 2, *local, "torchrun", "127.0.0.1", port, key=KEY)
            with pytest.raises(OSError, match="another MASTER_PORT"):
                rendezvous.meet(place, {}, None, 0.1, 1.0)


def test_a_rank_does_not_come(start):
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
    place = Place(0, 2, 0, 2, "mpirun")
    with pytest.raises(ValueError, match="mpirun does not say where rank 0 is: set MASTER_ADDR"):
        rendezvous.meet(place, {}, None, 1.0, 1.0)


def test_ranks_that_differ_are_named_with_both_values(start):
    facts = 'join({"needle": "0.1", "lr": "1e-3" if rank < 2 else "1e-4", "x": "y"} if rank != 1 '
    facts += 'else {"needle": "0.1", "lr": "1e-3", "z": "w"})'
    for body, size, words in [
        (
            facts,
            4,
            r"rank 1: x is not there, at rank 0 'y', z is 'w', at rank 0 not there; "
            r"ranks 2 and 3: lr is '1e-4', at rank 0 '1e-3'\n$",
        ),
        ("join(rank=min(rank, 1))", 3, r"rank 1 is claimed by process \d+ .* and by process \d+ "),
        ("join(size=2 + rank)", 2, r"was started as one of 3 ranks, rank 0 as one of 2"),
    ]:
        with naming(body):
            ended = [rank.end() for rank in start(body, size)]
            assert len({(code, said) for code, _, said in ended}) == 1
            code, _, said = ended[0]
            assert code == 1 and said.startswith("RanksDiffer rank ") and re.search(words, said)


def test_a_rank_of_another_job_looks_elsewhere(start):
    port = free_port()
    ours = start(MEET, 2, ranks=(0,), port=port)
    [other] = start("join(job='other')", 2, ranks=(1,), port=port, seconds=1.0)
    code, _, said = other.end()
    assert code == 75 and "another start" in said
    for rank in [*start(MEET, 2, ranks=(1,), port=port), *ours]:
        code, words, said = rank.end()
        assert (code, words) == (0, ["[0, 1]"]) and (not said or "another start" in said)


def test_strangers_neither_end_nor_delay_the_start(start, connect):
    """Strangers send other bytes than a rank's, half of them, or none; a rank dies meanwhile."""
    port = free_port()
    [first] = start(MEET, 3, ranks=(0,), port=port)
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 300,
        OWN,
        OWN[:5],
        b"[" * 9999,
    ):
        connect(port, data)
    gone = connect(port, OWN)
    claim(gone, size=3)
    gone.close()
    with within(8):  # less than a stranger's time
        others = start(MEET, 3, ranks=(1, 2), port=port)
        code, words, said = first.end()
    assert (code, words) == (0, ["[0, 1, 2]"])
    assert said.startswith("needle: rank 0 dropped ") and said.count("\n") == 1
    assert " connections of strangers: 127.0.0.1: " in said
    for rank in others:
        assert rank.end() == met(3)


def test_more_strangers_than_open_files_delay_no_start(start, connect):
    port = free_port()
    body = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n{MEET}"
    [first] = start(body, 2, ranks=(0,), port=port)
    for _ in range(400):
        connect(port)
    with within(8):  # less than a stranger's time
        [second] = start(MEET, 2, ranks=(1,), port=port)
        code, words, said = first.end()
    assert (code, words) == (0, ["[0, 1]"])
    assert "127.0.0.1: the oldest of more than 128 (" in said
    assert second.end() == met(2)


def test_a_stranger_is_dropped_after_a_time(start, connect):
    port = free_port()
    [first] = start(
        "sys.modules['needle.distributed.rendezvous'].STRANGER_SECONDS = 0.3\n" + MEET,
        2,
        ranks=(0,),
        port=port,
    )
    assert connect(port, OWN[:5]).recv(1) == b""
    [second] = start(MEET, 2, ranks=(1,), port=port)
    assert second.end() == met(2)
    assert "said nothing of this protocol for 0.3 s (1 times)" in first.end()[2]


def test_a_stranger_without_the_key_claims_no_rank(start, connect, monkeypatch, tmp_path):
    """Job, rank and size are those of the start; None: the key is the user's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for key in ("", "the key of others", None):
        port = free_port()
        body = MEET if key is not None else MEET.replace("join()", "join(key='')")
        [first] = start(body, 2, ranks=(0,), port=port)
        with naming("key", key):
            for size in (2, 3):
                sock = connect(port, OWN)
                claim(sock, key or "", size=size)
                assert sock.recv(1) == b""
            if key == "":  # the proof of one connection is none in another
                first_one, again = connect(port, OWN), connect(port, OWN)
                claim(again, replayed=claim(first_one, size=3, job="another"))
                assert again.recv(1) == b""
            [second] = start(body, 2, ranks=(1,), port=port)
            code, words, said = first.end()
            assert (code, words) == (0, ["[0, 1]"])
            times = "3 times" if key == "" else "2 times"
            assert f"{rendezvous.OTHER_KEY} ({times})" in said
            assert second.end() == met(2)


def test_a_rank_gives_no_other_program_its_proof(start):
    """The rank looks for rank 0 at the next port."""
    for answer in (b"HTTP/1.1 400\r\n\r\n" * 9, bytes(64)):
        with socket.create_server(("127.0.0.1", 0)) as forger:
            port = forger.getsockname()[1]
            [second] = start(MEET, 2, ranks=(1,), port=port)
            with forger.accept()[0] as sock:
                assert len(sock.recv(99)) == rendezvous.NONCE
                sock.sendall(answer)
                assert sock.recv(1) == b""
                forger.close()
                [first] = start(MEET, 2, ranks=(0,), port=port)
                assert second.end() == met(2) and first.end()[:2] == met(2)[:2]


def test_several_machines_without_a_key_are_warned_once(start):
    """Rank 0 warns, and the start goes on."""
    body = MEET.replace("join()", "join(local=False, key='')")
    first, second = (rank.end() for rank in start(body))
    assert first[:2] == second[:2] == (0, ["[0, 1]"]) and second[2] == ""
    assert first[2] == rendezvous.NO_KEY + "\n" and first[2].count("\n") == 1
    assert "NEEDLE_RANKS_KEY" in first[2] and "export it on all machines" in first[2]
    [command] = re.findall("python -c '(.*?)'", first[2])
    made = python(command).stdout
    environ = {"RANK": "0", "WORLD_SIZE": "2", "NEEDLE_RANKS_KEY": made.strip()}
    assert environment.find(environ).key == made.strip()
    assert [rank.end()[2] for rank in start(body.replace("''", repr(made.strip())))] == ["", ""]


def test_rank_0_listens_on_loopback_if_all_ranks_are_local(start, connect):
    """MASTER_ADDR may be the machine's name for others."""
    for local in (True, False):
        body = MEET.replace("join()", f"join(local={local}, host={{}})")
        port = free_port()
        host = repr(socket.gethostname()) if local else "'127.0.0.1'"
        [first] = start(body.format(host), 2, ranks=(0,), port=port)
        connect(port).close()
        found = {
            bytes.fromhex(line.split()[1].partition(":")[0])
            for path in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in Path(path).read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        }
        wanted = {bytes([1, 0, 0, 127])} if local else {bytes(4), bytes(16)}
        assert found and found <= wanted
        [second] = start(body.format(host), 2, ranks=(1,), port=port)
        assert second.end() == met(2) and first.end()[:2] == met(2)[:2]


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


def test_an_ipv6_address(start):
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no ::1 here")
    for rank in start(MEET.replace("join()", "join(host='::1', local=False)"), 2):
        assert rank.end() == met(2)


def test_names_of_ranks():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([0, 3]) == "ranks 0 and 3"
    assert name_ranks([1, 2, 5]) == "ranks 1, 2 and 5"
    assert name_ranks(list(range(99)), 2) == "ranks 0, 1 and 97 more"
