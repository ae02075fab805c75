"""needle/distributed/rendezvous.py: ranks that come, that do not, that do not belong together, and
strangers at the door."""

import json
import os
import socket
import struct
import time

import pytest
from rank_processes import free_port

from needle.distributed import rendezvous
from needle.distributed.environment import Place
from needle.distributed.rendezvous import name_ranks

MEET = """
control = join()
say(control.gather("all", rank))
control.close()
"""


def greeting(port, **changes):
    """A connection that says what a rank says, with changes."""
    said = {rendezvous.MAGIC: rendezvous.VERSION, "job": "test", "nonce": "", "rank": 1, "size": 2}
    said |= {
        "facts": {rendezvous.MAGIC: rendezvous.VERSION},
        "who": "somebody",
        "id": "x",
    } | changes
    return knock(port, frame(json.dumps(said).encode()))


def frame(text):
    return struct.pack(">I", len(text)) + text


def knock(port, data):
    end = time.monotonic() + 20
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)
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
    body += 'else {"needle": "0.1", "lr": "1e-3"})'
    ended = [rank.end() for rank in start(body, 4)]
    assert len({(code, said) for code, _, said in ended}) == 1
    code, _, said = ended[0]
    assert code == 1 and said == (
        "RanksDiffer rank 1: x is not there, at rank 0 'y'; "
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
    for rank in [*ours, *start(MEET, 2, ranks=(1,), port=port)]:
        assert rank.end() == (0, ["[0, 1]"], "")


def test_strangers_cost_nothing(start):
    """What they say, half of it, too much, or nothing at all: they neither hold up nor end ours."""
    port = free_port()
    [first] = start(MEET, 3, ranks=(0,), port=port)
    whole = frame(
        json.dumps({rendezvous.MAGIC: rendezvous.VERSION, "job": "test", "nonce": ""}).encode()
    )
    strangers = [
        knock(port, data)
        for data in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(range(256)) * 300,
            whole,  # lacks the rest
            whole[:-5],  # half a message
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
    ]
    gone = greeting(port, size=3)  # a rank, as it seems, that dies before all are there
    gone.close()
    time.sleep(0.2)
    for rank in (first, *start(MEET, 3, ranks=(1, 2), port=port)):
        assert rank.end() == (0, ["[0, 1, 2]"], "")
    for sock in strangers:
        sock.close()


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
    for rank in start(MEET.replace("join()", "join(host='::1')"), 2):
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
        place = Place(0, 2, 0, 2, "torchrun", "127.0.0.1", port)
        with pytest.raises(OSError, match="another MASTER_PORT"):
            rendezvous.meet(place, {}, None, 0.1, 1.0)


def test_names_of_ranks():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([0, 3]) == "ranks 0 and 3"
    assert name_ranks([1, 2, 5]) == "ranks 1, 2 and 5"
    assert name_ranks(list(range(99)), 2) == "ranks 0, 1 and 97 more"
