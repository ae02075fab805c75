"""An allocation that cannot be had raises, and afterwards everything works."""

import ctypes
import gc

import numpy as np
import pytest
from harness import live_bytes, python

import needle as ndl
from needle import _C, Tensor, ops

pytestmark = pytest.mark.slow

# More bytes than a process can address (2^47), so that no machine has them, not even one that
# promises more memory than it has.
TOO_MUCH = (2**46,)


def failures(device) -> type:
    return MemoryError if device == ndl.cpu() else (MemoryError, ndl.CudaError)


def works(device) -> None:
    x = Tensor(np.arange(6.0).reshape(2, 3), device=device)
    y = ops.matmul(x, ops.transpose(x))
    y.backward()
    assert y.numpy()[1, 1] == 50 and np.isfinite(x.grad.numpy()).all()


def test_a_huge_array(device):
    before = live_bytes(device)
    for _ in range(3):
        with pytest.raises(failures(device)) as raised:
            _C.empty(TOO_MUCH, "float32", device)
        assert not isinstance(raised.value, ndl.CudaFatalError)
        assert str(raised.value)
        assert live_bytes(device) == before
        works(device)


def test_a_huge_output(device):
    """Broadcast views of one element ask for outputs that no memory holds."""
    one = _C.array([1.0], device=device)
    wide = one.reshape((1, 1)).broadcast_to((2**23, 2**23))
    before = live_bytes(device)
    for wrong in (
        lambda: wide + 1,
        lambda: wide.exp(),
        lambda: wide.compact(),
        lambda: wide.astype("int64"),
        lambda: wide.reshape((2**46,)) + 1,
        lambda: _C.layernorm_fwd(
            wide, one.broadcast_to((2**23,)), one.broadcast_to((2**23,)), 1e-5
        ),
    ):
        with pytest.raises(failures(device)):
            wrong()
        assert live_bytes(device) == before
    works(device)


def test_sizes_that_overflow():
    for shape in [(2**62, 4), (2**32, 2**32), (2**63 - 1,)]:
        with pytest.raises((ValueError, MemoryError)):
            _C.empty(shape, "float32", ndl.cpu())
    with pytest.raises(MemoryError, match="any machine"):
        _C.empty((2**60,), "float32", ndl.cpu())
    with pytest.raises((ValueError, OverflowError)):
        _C.empty((2**70,), "float32", ndl.cpu())
    works(ndl.cpu())


def test_memory_of_every_size_is_counted_aligned_and_given_back():
    gc.collect()  # arrays that earlier tests left must not go in between
    ndl.cpu().empty_cache()
    before = ndl.cpu().memory_stats()
    for size in [0, 1, 8, 57, 400, 2801, 19608, 137257, 960800, 6725601, 47079208]:
        held = _C.empty((size,), "uint8", ndl.cpu())
        held.fill(1)
        assert ndl.cpu().memory_stats()["live_bytes"] - before["live_bytes"] == size
        assert held._handle.ptr() % 64 == 0
        del held
    ndl.cpu().empty_cache()
    after = ndl.cpu().memory_stats()
    assert after["live_bytes"] == before["live_bytes"]
    assert after["reserved_bytes"] == before["reserved_bytes"]


KEPT = """
import resource
from needle import _C
held = _C.empty((32 << 20,))  # 128 MiB
del held
assert _C.cpu().memory_stats()["reserved_bytes"] >= 128 << 20
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20),) * 2)
_C.empty((80 << 20,)).fill(1)  # 320 MiB, of another size than what is kept
print("done")
"""


@pytest.mark.skipif(
    hasattr(ctypes.CDLL(None), "__asan_init"), reason="under the sanitizers nothing is kept"
)
def test_memory_that_is_kept_goes_back_before_an_allocation_fails():
    done = python(KEPT, OMP_NUM_THREADS="1")
    assert done.stdout == "done\n", done.stderr
