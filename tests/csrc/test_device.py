"""Devices: their names, and the memory and time that they count."""

import pytest

from needle import _C
from needle import backend_ndarray as nd


def test_device():
    assert nd.cpu() == nd.cpu() and hash(nd.cpu()) == hash(nd.cpu()) and nd.cpu() != "cpu()"
    assert str(nd.cpu()) == "cpu()" and nd.cpu().enabled()
    assert str(nd.cuda()) == "cuda()" and str(nd.cuda(1)) == "cuda(1)"
    assert nd.cuda() == nd.cuda(0) != nd.cuda(1) and nd.cuda() != nd.cpu()
    assert nd.default_device() == nd.cpu() and nd.cpu() in nd.all_devices()
    with pytest.raises((ValueError, TypeError)):
        nd.cuda(-1)
    stats = nd.cpu().memory_stats()
    assert set(stats) >= {"live_bytes", "peak_bytes", "reserved_bytes"}
    facts = nd.cpu().properties()
    assert facts["processors"] > 0 and facts["detail"]
    start, end = _C.Event(nd.cpu()), _C.Event(nd.cpu())
    start.record()
    end.record()
    assert 0 <= start.elapsed(end) < 1000


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
