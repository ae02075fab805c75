"""Batches made ahead on another thread: the same ones, in memory that is not written too early."""

import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from harness import DEVICES, device_of
from token_files import IDS

import needle as ndl
from needle import _C
from needle.backend_ndarray import full
from needle.data import Batches, DataError, Prefetch, prefetch


def host(array):
    return array if isinstance(array, np.ndarray) else array.numpy()


def made(tokens=IDS, **more):
    return Batches(tokens, 3, 16, seed=4, **more)


@pytest.mark.parametrize("device", DEVICES)
def test_prefetch_draws_the_same_batches_and_knows_its_position(device):
    plain, ahead = made(vocab_size=60), Prefetch(made(vocab_size=60), device_of(device), depth=3)
    assert len(ahead) == len(plain)
    held = []
    big = full((4096, 4096), 0.5, "float32", ndl.cuda()) if device == "cuda" else None
    for _ in range(2 * len(plain) + 5):
        if big is not None:
            big @ big  # the device is busy: copies of batches queue after it
        assert ahead.position == plain.position
        held.append((ahead.next(), plain.next()))
    for got, expected in held:  # none was overwritten by a later one
        for a, b in zip(got, expected):
            np.testing.assert_array_equal(host(a), b)
    position = ahead.position
    ahead.close()
    ahead.close()
    assert ahead.position == position
    np.testing.assert_array_equal(host(ahead.next()[0]), plain.next()[0])
    for one in ahead, plain:
        one.seek({"epoch": 1, "batch": 2})
    np.testing.assert_array_equal(host(ahead.next()[1]), plain.next()[1])
    ahead.close()


class Queued(bytearray):
    """Pinned memory of a device that copies only when it is waited for."""

    def __init__(self, count, device):
        super().__init__(count)
        self.due = None  # the copy that was enqueued

    def wait(self):
        if self.due is not None:
            self.due[:] = np.frombuffer(self, np.int32).reshape(self.due.shape)
            self.due = None

    def send(self, shape, dtype):
        assert self.due is None and dtype == "int32"
        self.due = np.full(shape, -1, np.int32)
        return self.due


def test_pinned_buffer_is_written_only_after_its_copy(monkeypatch):
    buffers, plain, depth = [], made(), 2
    monkeypatch.setattr(
        prefetch, "PinnedBuffer", lambda *given: buffers.append(Queued(*given)) or buffers[-1]
    )
    ahead = Prefetch(made(vocab_size=60), SimpleNamespace(is_host=False), depth)
    assert len(buffers) == 2 * (depth + 1)  # so that `depth` are ahead while one is copied
    got = [ahead.next() for _ in range(40)]
    ahead.close()
    for buffer in buffers:
        buffer.wait()  # the device ends its work
    for batch in got:
        for a, b in zip(batch, plain.next()):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="vocab_size"):
        Prefetch(made(), SimpleNamespace(is_host=False))


def test_errors_arrive_with_their_batch_and_cost_none():
    ahead = Prefetch(Batches(np.full(161, 99, np.int32), 2, 16, vocab_size=60))
    for _ in range(2):
        with pytest.raises(DataError, match="id 99 is outside the vocabulary of 60"):
            ahead.next()
    assert ahead.position == {"epoch": 0, "batch": 0}
    ahead.close()


def test_dropped_prefetch_ends_its_thread():
    ahead = Prefetch(made())
    ahead.next()
    ours = lambda: [t for t in threading.enumerate() if t.name.startswith("needle.data.Prefetch")]
    (thread,) = ours()
    del ahead
    gc.collect()
    thread.join(10)
    assert not ours()


@pytest.mark.parametrize("device", DEVICES)
def test_pinned_buffer(device):
    where = device_of(device)
    buffer = _C.PinnedBuffer(4 * 24, where)
    memory = np.frombuffer(buffer, np.int32)
    assert memory.flags.writeable and len(memory) == 24
    sent = []
    for number in range(50):
        buffer.wait()
        memory[:] = np.arange(24) + number
        sent.append(buffer.send((2, 3, 4), "int32"))
    for number, array in enumerate(sent):
        assert array.device == where and array.dtype == "int32"
        np.testing.assert_array_equal(array.numpy(), np.arange(24).reshape(2, 3, 4) + number)
    buffer.wait()
    assert buffer.send((0, 3), "float32").shape == (0, 3)
    with pytest.raises(ValueError, match="25"):
        _C.PinnedBuffer(25, where).send((26,), "uint8")
    for bad, error in (0, ValueError), (-1, ValueError), (2**62, (MemoryError, RuntimeError)):
        with pytest.raises(error):
            _C.PinnedBuffer(bad, where)
    del buffer  # the exported memory keeps it
    memory[:] = 1
