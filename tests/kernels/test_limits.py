"""needle/kernels/limits.py: every limit with both numbers. Needs no GPU and no NVRTC."""

import dataclasses

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle.kernels import limits
from needle.kernels.limits import LaunchError, Resources


def Kernel(**needs) -> Resources:
    return Resources(**{"name": "f", "registers": 32, **needs})


H = limits.of_arch("90a")
DEVICE = limits.Limits("cuda()", 90, 132, 2048, block_shared=232448, free_bytes=2**30)


# ---- each limit, with both numbers ---------------------------------------------------------------


REGISTERS = (
    r"needs 98,304 registers \(96 a thread\), and sm_90a has 65,536 a block; use at most 640 "
    r"threads, or compile with __launch_bounds__\(1024\)$"
)


def test_each_limit_names_both_numbers():
    for kernel, launch, said in (
        ({}, (1, 2048), r"block.x is 2,048, and at most 1,024"),
        ({}, (1, (5, 205)), r"block \(5, 205, 1\) has 1,025 threads, and sm_90a allows 1,024"),
        ({}, (1, (32, 64)), r"block \(32, 64, 1\) has 2,048 threads, and sm_90a allows 1,024"),
        ({}, (1, (1, 1, 65)), r"block.z is 65, and at most 64"),
        ({}, (1, 0), r"block.x is 0, and must be 1 or more"),
        ({}, ((1, 65536), 1), r"grid.y is 65,536, and at most 65,535 are allowed; put the largest"),
        ({}, ((1, 1, 65536), 1), r"grid.z is 65,536, and at most 65,535"),
        ({}, (2**31, 1), r"grid.x is 2,147,483,648, and at most 2,147,483,647"),
        ({}, (-1, 1), r"grid.x is -1, and must be 1 or more"),
        ({"max_threads": 128}, (1, 129), r"129 threads, and the source promises at most 128"),
        ({"block": (64, 2, 1)}, (1, 64), r"block is \(64, 1, 1\), and the source fixes it at \("),
        ({"registers": 96}, (1, 1024), REGISTERS),
        ({}, (1, 32, -1), r"shared is -1 bytes"),
        ({}, (16, 32, 0, 16), r"cluster \(16, 1, 1\) has 16 blocks, and at most 8"),
        ({}, (6, 32, 0, 4), r"grid.x is 6, which is no multiple of cluster.x = 4; round it up"),
        ({}, ((4, 3), 32, 0, (2, 2)), r"grid.y is 3, which is no multiple of cluster.y = 2"),
        (
            {"cluster": (2, 1, 1)},
            (4, 32, 0, 4),
            r"cluster is \(4, 1, 1\), and .* it at \(2, 1, 1\)",
        ),
        ({"cluster": (2, 1, 1)}, (3, 32), r"grid.x is 3, which is no multiple of cluster.x = 2"),
    ):
        with naming(kernel), pytest.raises(LaunchError, match=rf"^f: .*{said}"):
            limits.check(Kernel(**kernel), H, *launch)


def test_clusters_need_hopper():
    with pytest.raises(LaunchError, match=r"needs compute capability 9.0, and sm_80 has 8.0"):
        limits.check(Kernel(), limits.of_arch("80"), 4, 32, 0, 2)
    assert limits.check(Kernel(), limits.of_arch("80"), 4, 32, 0, 1).cluster == (1, 1, 1)
    assert limits.check(Kernel(), H, (4, 2), 32, 0, (4, 2)).cluster == (4, 2, 1)


def test_shared_memory_is_compared_with_the_devices():
    with pytest.raises(
        LaunchError, match=r"240,000 .*\(40,000 static, 200,000 dynamic\), and cuda"
    ):
        limits.check(Kernel(shared_bytes=40000), DEVICE, 1, 32, 200000)
    assert limits.check(Kernel(), DEVICE, 1, 32, 232448).shared_bytes == 232448
    assert limits.check(Kernel(), H, 1, 32, 300000).shared_bytes == 300000  # a device may have it


def test_resident_blocks_are_counted_by_the_device():
    asked = []

    def count(threads, shared):
        asked.append((threads, shared))
        return 6

    kernel = Kernel(shared_bytes=1000)
    report = limits.check(
        kernel, DEVICE, (132, 6), (100, 2), 24, cooperative=True, count_blocks=count
    )
    assert asked == [(200, 24)] and report.blocks_per_sm == 6 and report.resident == 792
    assert report.occupancy == 6 * 224 / 2048  # threads in warps
    with pytest.raises(
        LaunchError,
        match=r"cooperative grid of 793 blocks, and cuda\(\) holds 792 at once \(6 on each of 132 "
        r"multiprocessors\)",
    ):
        limits.check(kernel, DEVICE, 793, 200, cooperative=True, count_blocks=count)
    alone = limits.check(kernel, H, 793, 200, cooperative=True)
    assert alone.blocks_per_sm is alone.occupancy is alone.resident is None


def test_local_memory_is_that_of_all_resident_threads():
    """132 x 2048 threads; 1 GiB is free, and what the context holds already counts as free."""
    threads = 132 * 2048
    most = 2**30 // threads + limits.OPEN_LOCAL
    limits.check(Kernel(local_bytes=most), DEVICE, 1, 32)
    with pytest.raises(
        LaunchError,
        match=rf"{most + 1:,} bytes of local memory a thread, 1.26 GiB for the {threads:,} threads "
        r"that cuda\(\) can hold, and 1.26 GiB are free; make arrays in the kernel smaller",
    ):
        limits.check(Kernel(local_bytes=most + 1), DEVICE, 1, 32)
    limits.check(Kernel(local_bytes=most + 1), DEVICE, 1, 32, held_local=most + 1)
    limits.check(Kernel(local_bytes=500_000), H, 1, 32)


def test_wrong_sizes_are_named():
    for launch, error, said in (
        (("4", 32), TypeError, "f: grid: must be a whole number or .* up to three, not '4'"),
        ((4.0, 32), TypeError, "f: grid: must be"),
        ((4, (32, 1.0)), TypeError, "f: block: must be"),
        ((4, None), TypeError, "f: block: must be"),
        (((1, 1, 1, 1), 32), ValueError, "f: grid: 4 sizes"),
        ((4, ()), ValueError, "f: block: 0 sizes"),
        ((np.array([4, 2.5]), 32), TypeError, "f: grid: must be"),
        ((np.array([[4, 2]]), 32), TypeError, "f: grid: must be"),
        ((4, 32, np.array([1, 2])), TypeError, "f: shared: must be a whole number of bytes"),
        ((4, 32, 1.5), TypeError, "f: shared: must be a whole number of bytes"),
        ((4, 32, 0, "2"), TypeError, "f: cluster: must be"),
    ):
        with naming(launch), pytest.raises(error, match=said):
            limits.check(Kernel(), H, *launch)


def test_sizes_may_be_numpys():
    for kind in (tuple, list, np.array, lambda sizes: map(np.int64, sizes)):
        with naming(kind):
            report = limits.check(Kernel(), H, kind([4, 2]), kind([32]), np.int32(8))
            assert (report.grid, report.block, report.shared_bytes) == ((4, 2, 1), (32, 1, 1), 8)
            assert all(type(n) is int for n in report.grid)
            assert limits.check(Kernel(), H, np.array(4), 32).grid == (4, 1, 1)


def test_a_launch_error_is_a_cuda_error_that_can_be_retried():
    assert issubclass(LaunchError, ndl.CudaError)
    assert not issubclass(LaunchError, ndl.CudaFatalError)


# ---- the table and the report --------------------------------------------------------------------


def test_architectures_are_parsed():
    names = {"90a": "90a", "sm_90": "90", "9.0": "90", 80: "80", "compute_120f": "120f"}
    for text, name in (names | {"12.1": "121", " SM_90A ": "90a"}).items():
        with naming(text):
            assert limits.parse_arch(text) == name
            assert limits.of_arch(text).where == f"sm_{name}"


def test_wrong_architectures_are_named():
    for text in ("", "ninety", "9", "90x", "sm90", "1234"):
        with pytest.raises(ValueError, match="is no architecture"):
            limits.parse_arch(text)
    for arch in (90.0, 9.0, None, b"90a"):
        with pytest.raises(TypeError, match='arch: must be a text such as "90a" or a number such'):
            limits.parse_arch(arch)


def test_the_report_can_be_read():
    kernel = Kernel(name="scale<float>", registers=40, shared_bytes=1000, local_bytes=16)
    way = (7, 2), 256, 24000
    report = limits.check(kernel, DEVICE, *way, None, True, lambda threads, shared: 6)
    assert str(report) == (
        "scale<float> on cuda(): grid (7, 2, 1), block (256, 1, 1), cooperative\n"
        "  6 blocks a multiprocessor, 792 on the device: occupancy 75%\n"
        "  40 registers and 16 bytes of local memory a thread, "
        "25,000 bytes of shared memory a block"
    )
    assert "occupancy" not in str(limits.check(kernel, H, *way))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.threads = 3
