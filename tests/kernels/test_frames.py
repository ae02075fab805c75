"""needle/kernels/frames.py: what goes over the socket, and what is refused."""

import os
import select
import socket
import threading

import pytest

from needle.kernels import frames
from needle.kernels.frames import HEAD, MARK, Channel, FrameError


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield Channel(one), Channel(other)


def test_a_frame_arrives_as_it_was_sent(ends):
    one, other = ends
    block = os.urandom(3 << 20)  # more than a socket holds at once
    sender = threading.Thread(target=one.send, args=({"a": [1, None, "é"]}, block))
    sender.start()
    header, got, files = other.receive()
    sender.join()
    assert (header, got, files) == ({"a": [1, None, "é"]}, block, [])


def test_open_files_travel_and_are_not_inherited(ends):
    one, other = ends
    file = os.memfd_create("x")
    os.write(file, b"shared")
    one.send({}, b"behind", [file])
    _, block, (got,) = other.receive()
    assert block == b"behind"
    assert os.pread(got, 10, 0) == b"shared"
    assert not os.get_inheritable(got)
    os.close(got)
    os.close(file)


def test_the_end_is_an_eof(ends):
    one, other = ends
    one.close()
    with pytest.raises(EOFError):
        other.receive()


@pytest.mark.parametrize(
    "data",
    [
        b'{"status": "ok"}\n' * 4,
        HEAD.pack(b"what", 2, 0) + b"{}",
        HEAD.pack(MARK, frames.JSON_BYTES + 1, 0),
        HEAD.pack(MARK, 2, frames.BLOCK_BYTES + 1) + b"{}",
        HEAD.pack(MARK, 2, 0) + b"[]",
        HEAD.pack(MARK, 1, 0) + b"{",
        HEAD.pack(MARK, 2, 0) + b"\xff\xff",
        HEAD.pack(MARK, 200_000, 0) + b"[" * 200_000,
    ],
)
def test_what_is_no_frame_is_refused(ends, data):
    one, other = ends
    sender = threading.Thread(target=one.sock.sendall, args=(data,))
    one.sock.setblocking(True)
    sender.start()
    with pytest.raises(FrameError):
        other.receive()
    other.close()
    sender.join()


def test_half_a_frame_is_an_eof(ends):
    one, other = ends
    one.sock.send(HEAD.pack(MARK, 10, 0) + b"{")
    one.close()
    with pytest.raises(EOFError):
        other.receive()


def test_too_large_a_frame_is_not_sent(ends, monkeypatch):
    monkeypatch.setattr(frames, "BLOCK_BYTES", 10)
    with pytest.raises(ValueError, match="a frame of 2 bytes of JSON, 11 bytes and 0 files"):
        ends[0].send({}, b"x" * 11)


def test_whoever_waits_may_give_up():
    one, other = socket.socketpair()

    def late(sock, events):
        assert sock is one
        raise TimeoutError(events)

    with one, other:
        with pytest.raises(TimeoutError, match=str(select.POLLIN)):
            Channel(one, late).receive()
        with pytest.raises(TimeoutError, match=str(select.POLLOUT)):
            Channel(one, late).send({}, b"x" * (16 << 20))
