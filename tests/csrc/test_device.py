"""Devices: their names, the memory and time that they count, and memory that cannot be had."""

import gc
import pickle
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from harness import SANITIZED, live_bytes, naming, python

import needle as ndl
from needle import _C, Tensor, ops
from needle import backend_ndarray as nd

keeps_memory = pytest.mark.skipif(SANITIZED, reason="under the sanitizers nothing is kept")


def test_device():
    assert nd.cpu() == nd.cpu() and hash(nd.cpu()) == hash(nd.cpu()) and nd.cpu() != "cpu()"
    assert str(nd.cpu()) == "cpu()" and nd.cpu().enabled()
    assert str(nd.cuda()) == "cuda()" and str(nd.cuda(1)) == "cuda(1)"
    assert nd.cuda() == nd.cuda(0) != nd.cuda(1) and nd.cuda() != nd.cpu()
    assert nd.default_device() == nd.cpu() and nd.cpu() in nd.all_devices()
    for make in (nd.cpu, nd.cuda):
        for index in (-1, 64, 2**40):
            with pytest.raises(ValueError, match=f"index: {index} is not in 0 ... 63"):
                make(index)
    for device in (nd.cpu(), nd.cuda(), nd.cuda(1)):
        assert pickle.loads(pickle.dumps(device)) == device
    facts = nd.cpu().properties()
    assert facts["processors"] > 0 and facts["detail"]
    assert nd.cpu().stream == nd.cpu().side_stream == 0 and facts["uuid"] == ""
    count = sum(device.name == "cuda" and device.enabled() for device in nd.all_devices())
    assert nd.cuda.device_count() == count and nd.cuda.is_available() == nd.cuda(index=0).enabled()
    if "OpenBLAS" in facts["products"]:  # another version may give other bits
        assert re.search(r"OpenBLAS \d+\.\d+\S* \w+$", facts["products"])


def test_events():
    start, end = _C.Event(nd.cpu()), _C.Event(nd.cpu())
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed(end) < 2000  # milliseconds
    assert end.done() is True and end.wait() is None and end.record(side=True) is None
    for wrong in ("end", None, nd.cpu()):
        with pytest.raises(TypeError, match="must be an Event of this device"):
            start.elapsed(wrong)


@pytest.mark.parametrize("name, index", [("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_the_device_that_a_command_line_names(monkeypatch, name, index):
    asked = []
    monkeypatch.setattr(nd, "cuda", lambda index=0: asked.append(index) or nd.cpu())
    assert nd.choose_device(name) == nd.cpu() and asked == [index]


def test_a_gpu_without_its_libraries_is_named(monkeypatch, tmp_path, capsys):
    """Only where NVIDIA's driver is: the CPU is taken, and a line says what to install."""
    gpu = SimpleNamespace(enabled=lambda: False, reason=lambda: "cannot load: needle-lm[cuda13]")
    monkeypatch.setattr(nd, "cuda", lambda: gpu)
    for driver, lines in ((tmp_path, 1), (tmp_path / "none", 0)):
        monkeypatch.setattr(nd, "DRIVER", driver)
        assert nd.choose_device("auto") == nd.cpu()
        assert capsys.readouterr().err.count("needle-lm[cuda13]") == lines


# ---- memory --------------------------------------------------------------------------------------


def test_memory_stats_count_arrays(device):
    nd.empty((1,), device=device)
    before = device.memory_stats()["live_bytes"]
    one = nd.empty((1,), device=device)
    device.reset_peak()
    assert device.memory_stats()["peak_bytes"] == device.memory_stats()["live_bytes"] > before
    del one
    held = nd.zeros((256, 1024), device=device)
    stats = device.memory_stats()
    assert stats["live_bytes"] - before >= 2**20 and stats["reserved_bytes"] >= stats["live_bytes"]
    del held
    after = device.memory_stats()
    assert after["live_bytes"] == before and after["peak_bytes"] >= before + 2**20
    small = nd.zeros((4,), device=device)  # allocating less than was held before
    assert device.memory_stats()["peak_bytes"] == after["peak_bytes"] and small.size == 4
    del small
    device.synchronize()
    device.empty_cache()
    assert device.memory_stats()["reserved_bytes"] <= after["reserved_bytes"]


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


@keeps_memory
def test_memory_that_is_kept_stays_below_a_bound():
    def reserved(*sizes):
        held = [_C.empty((size << 20,), "uint8", nd.cpu()) for size in sizes]
        del held
        return nd.cpu().memory_stats()["reserved_bytes"] - before

    gc.collect()
    nd.cpu().empty_cache()
    before = nd.cpu().memory_stats()["reserved_bytes"]
    for size in range(1, 257):  # one at a time, and none twice
        assert reserved(size) <= 1.25 * 320 * 2**20 + 64 * 2**20 + before / 4
    nd.cpu().empty_cache()
    step = reserved(200, 100, 50, 3, 3), reserved(70, 7), reserved(200, 100, 50, 3, 3)
    assert step[0] < step[1] == step[2]  # what a loop asks for again is kept


def test_memory_that_no_machine_has_is_refused_and_all_goes_on(device):
    """2^46 floats are more than a process can address, so that not even a machine has them that
    promises more memory than it has. Views of one element ask for as much."""
    one = _C.array([1.0], device=device)
    wide, row = one.reshape((1, 1)).broadcast_to((2**23, 2**23)), one.broadcast_to((2**23,))
    before = live_bytes(device)
    calls = {
        "empty": lambda: _C.empty((2**46,), "float32", device),
        "add": lambda: wide + 1,
        "exp": lambda: wide.exp(),
        "compact": lambda: wide.compact(),
        "astype": lambda: wide.astype("int64"),
        "reshape": lambda: wide.reshape((2**46,)) + 1,
        "layernorm_fwd": lambda: _C.layernorm_fwd(wide, row, row, 1e-5),
    }
    for name, call in calls.items():
        error = MemoryError if device == ndl.cpu() else (MemoryError, ndl.CudaError)
        with naming(name), pytest.raises(error) as raised:
            call()
        assert str(raised.value) and not isinstance(raised.value, ndl.CudaFatalError)
        assert live_bytes(device) == before, name
    for shape in [(2**62, 4), (2**32, 2**32), (2**63 - 1,), (2**70,), (2**60,)]:
        with naming(shape), pytest.raises((ValueError, MemoryError, OverflowError)):
            _C.empty(shape, "float32", ndl.cpu())
    x = Tensor(np.arange(6.0).reshape(2, 3), device=device)
    y = ops.matmul(x, ops.transpose(x))
    y.backward()
    assert y.numpy()[1, 1] == 50 and np.isfinite(x.grad.numpy()).all()


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


@keeps_memory
def test_memory_that_is_kept_goes_back_before_an_allocation_fails():
    done = python(KEPT, OMP_NUM_THREADS="1")
    assert done.stdout == "done\n", done.stderr
