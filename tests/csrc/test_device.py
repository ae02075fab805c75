"""Devices: their names, and the memory and time that they count."""

import ctypes
import gc
import pickle
import re
import time
from types import SimpleNamespace

import pytest

from needle import _C
from needle import backend_ndarray as nd


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
    stats = nd.cpu().memory_stats()
    assert set(stats) >= {"live_bytes", "peak_bytes", "reserved_bytes"}
    facts = nd.cpu().properties()
    assert facts["processors"] > 0 and facts["detail"]
    start, end = _C.Event(nd.cpu()), _C.Event(nd.cpu())
    start.record()
    time.sleep(0.02)
    end.record()
    assert 20 <= start.elapsed(end) < 2000  # milliseconds
    assert end.done() is True
    assert nd.cpu().stream == 0 and facts["uuid"] == ""
    for wrong in ("end", None, nd.cpu()):
        with pytest.raises(TypeError, match="must be an Event of this device"):
            start.elapsed(wrong)


@pytest.mark.skipif(
    hasattr(ctypes.CDLL(None), "__asan_init"), reason="under the sanitizers nothing is kept"
)
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


@pytest.mark.skipif("OpenBLAS" not in nd.cpu().properties()["products"], reason="no OpenBLAS")
def test_products_name_the_version_of_openblas():
    """Another one may give other bits: a checkpoint remembers it."""
    assert re.search(r"OpenBLAS \d+\.\d+\S* \w+$", nd.cpu().properties()["products"])


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


def test_cuda_says_whether_gpus_can_be_used():
    count = sum(device.name == "cuda" and device.enabled() for device in nd.all_devices())
    assert nd.cuda.device_count() == count and nd.cuda.is_available() == nd.cuda(index=0).enabled()


def test_memory_stats_count_arrays():
    before = nd.cpu().memory_stats()["live_bytes"]
    held = nd.zeros((256, 1024))
    assert nd.cpu().memory_stats()["live_bytes"] - before >= 2**20
    nd.cpu().reset_peak()
    del held
    after = nd.cpu().memory_stats()
    assert after["live_bytes"] == before and after["peak_bytes"] >= before + 2**20
    small = nd.zeros((4,))  # allocating less than was held before
    assert nd.cpu().memory_stats()["peak_bytes"] == after["peak_bytes"] and small.size == 4
