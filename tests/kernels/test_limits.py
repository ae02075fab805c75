"""needle/kernels/limits.py: every limit with both numbers. Needs no GPU and no NVRTC."""

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle.kernels import limits
from needle.kernels.limits import Entry, LaunchError, Limits
from needle.kernels.signature import Signature

H, AMPERE = limits.of_arch("90a"), limits.of_arch("80")
OF_DEVICE = {"processors": 132, "sm_threads": 2048, "block_shared": 232448, "free_bytes": 2**30}
ASKED = []  # how many blocks the device holds
OF_DEVICE["count_blocks"] = lambda *asked: ASKED.append(asked) or 6
DEVICE = Limits("cuda()", 90, **OF_DEVICE)
THREADS = 132 * 2048  # of that device
LOCAL = 2**30 // THREADS + limits.OPEN_LOCAL  # what its context holds already counts as free
TOO_MUCH_LOCAL = (
    rf"\({LOCAL + 1:,} for each of {THREADS:,} threads .*: {THREADS * (LOCAL + 1):,}, and cuda\(\) "
    rf"allows {2**30 + THREADS * limits.OPEN_LOCAL:,}; make arrays in the kernel smaller"
)
REGISTERS = (
    r"registers a block \(96 a thread\): 98,304, and sm_90a allows 65,536; use at most 640 threads"
    r", or compile with __launch_bounds__\(1024\)$"
)
COOPERATIVE = (
    r"cooperative grid of 793 blocks, and cuda\(\) holds 792 at once \(6 on each of 132 "
    r"multiprocessors\)"
)
SHARED = r"memory a block \(40,000 of them static\): 240,000, and cuda\(\) allows 232,448; use"
FIXED = {"cluster": (2, 1, 1)}
E, T, V = LaunchError, TypeError, ValueError


def checked(kernel, where, launch):
    made = Entry("f", "f", "90a", Signature("f", ()), **{"registers": 32, **kernel})
    return made.check(*launch, limits=where)


def test_launch_beyond_a_limit_names_both_numbers():
    for where, kernel, launch, error, said in (
        (H, {}, (1, (1, 1, 65)), E, r"block.z: 65, and sm_90a allows 64; use smaller"),
        (H, {}, (1, (5, 205)), E, r"threads a block: 1,025, and sm_90a allows 1,024; use smaller"),
        (H, {}, ((1, 65536), 1), E, r"grid.y: 65,536, and sm_90a allows 65,535; put the largest"),
        (H, {}, ((1, 1, 65536), 1), E, r"grid.z: 65,536, and sm_90a allows 65,535; put the"),
        (H, {}, (2**31, 1), E, r"grid.x: 2,147,483,648, and sm_90a allows 2,147,483,647"),
        (H, {}, ((4, 0), 1), E, r"grid is \(4, 0, 1\), and must be 1 or more"),
        (H, {}, (4, 1, 0, 0), E, r"cluster is \(0, 1, 1\), and must be 1 or more"),
        (H, {"max_threads": 128}, (1, 129), E, r"129, and sm_90a allows 128; .*__launch_bounds__"),
        (H, {"block": (64, 2, 1)}, (1, 64), E, r"block is \(64, 1, 1\), and the source fixes it a"),
        (H, {"registers": 96}, (1, 1024), E, REGISTERS),
        (H, {"registers": 96}, (1, 672), E, r": 73,728, and"),  # 21 warps take those of 24
        (H, {"registers": 96}, (1, 641), E, r": 73,728, and"),  # one thread takes a warp
        (H, {"registers": 85}, (1, 768), E, r": 67,584, and"),  # each of them those of 88
        (DEVICE, {"shared_bytes": 40000}, (1, 32, 200000), E, SHARED),
        (AMPERE, {}, (4, 32, 0, 2), E, "a cluster: 2, and sm_80 allows 1; clusters need compute"),
        (H, {}, (16, 32, 0, 16), E, r"blocks a cluster: 16, and sm_90a allows 8"),
        (H, {}, ((4, 4), 32, 0, (4, 4)), E, r"blocks a cluster: 16, and sm_90a allows 8"),
        (H, {}, ((4, 3), 32, 0, (2, 2)), E, r"grid.y is 3, which is no multiple of cluster.y = 2"),
        (H, FIXED, (4, 32, 0, 4), E, r"cluster is \(4, 1, 1\), and .* it at \(2, 1, 1\)"),
        (H, FIXED, (3, 32), E, r"grid.x is 3, which is no multiple of cluster.x = 2"),
        (DEVICE, {}, (793, 200, 0, None, True), E, COOPERATIVE),
        (DEVICE, {"local_bytes": LOCAL + 1}, (1, 32), E, TOO_MUCH_LOCAL),
        (H, {}, ("4", 32), T, "grid: must be a whole number or .* up to three, not '4'"),
        (H, {}, ((1, 1, 1, 1), 32), V, "grid: must be .* not "),
        (H, {}, (4, 32, 1.5), T, "shared: must be a whole number"),
        (H, {}, (1, 32, -1), V, "shared: must be 0 or more"),
        (H, {}, (1, 32, True), T, "shared: must be a whole number, not True"),
    ):
        with naming(kernel, launch), pytest.raises(error, match=rf"^f: .*{said}"):
            checked(kernel, where, launch)
    assert issubclass(LaunchError, ndl.CudaError)  # the next launch works
    assert not issubclass(LaunchError, ndl.CudaFatalError)


def test_launch_at_a_limit_fits():
    held = Limits("cuda()", 90, **OF_DEVICE, held_local=LOCAL + 1)
    for where, kernel, launch in (
        (H, {}, ((2**31 - 1, 65535, 65535), (4, 4, 64))),
        (H, {"registers": 96}, (1, 640)),
        (H, {"max_threads": 128}, (1, 128)),
        (DEVICE, {}, (1, 32, 232448)),
        (H, {}, (1, 32, 300000)),  # a device may have it
        (AMPERE, {}, (4, 32, 0, 1)),
        (H, {}, ((4, 2), 32, 0, (4, 2))),
        (DEVICE, {}, (792, 200, 0, None, True)),
        (DEVICE, {"local_bytes": LOCAL}, (1, 32)),
        (held, {"local_bytes": LOCAL + 1}, (1, 32)),
        (H, {"local_bytes": 500_000}, (1, 32)),
    ):
        with naming(kernel, launch):
            checked(kernel, where, launch)


def test_report_has_sizes_and_the_occupancy_of_the_device():
    kernel = {"shared_bytes": 1000, "registers": 40, "local_bytes": 16}
    report = checked(kernel, DEVICE, (1, (100, 2), 24))
    assert limits.of_arch("100f").arch == 100
    assert ASKED[-1] == (200, 24) and report.blocks_per_sm == 6 and report.resident == 792
    assert report.occupancy == 6 * 224 / 2048  # threads in warps
    assert (report.grid, report.block, report.threads) == ((1, 1, 1), (100, 2, 1), 200)
    assert (report.registers, report.shared_bytes, report.local_bytes) == (40, 1024, 16)
    alone = checked(kernel, None, (793, 200, 0, None, True))  # on every GPU of the architecture
    assert alone.blocks_per_sm is alone.occupancy is alone.resident is None and alone.cooperative
    for arch in "90ab", "9", "sm_90", 90:
        with naming(arch), pytest.raises(V, match=r'arch: must be one as "90a" or "80", not '):
            limits.of_arch(arch)
    for kind in (tuple, list, np.array):
        with naming(kind):
            report = checked({}, H, (kind([4, 2]), kind([32]), np.int32(8)))
            assert (report.grid, report.block, report.shared_bytes) == ((4, 2, 1), (32, 1, 1), 8)
            assert all(type(n) is int for n in report.grid)
