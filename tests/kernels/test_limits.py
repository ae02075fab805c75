"""needle/kernels/limits.py: every limit with both numbers. Needs no GPU and no NVRTC."""

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle.kernels import limits
from needle.kernels.limits import LaunchError, Resources


def Kernel(**needs) -> Resources:
    return Resources(**{"name": "f", "registers": 32, **needs})


H, AMPERE = limits.of_arch("90a"), limits.of_arch("80")
DEVICE = limits.Limits("cuda()", 90, 132, 2048, block_shared=232448, free_bytes=2**30)
THREADS = 132 * 2048  # of that device
LOCAL = 2**30 // THREADS + limits.OPEN_LOCAL  # what its context holds already counts as free

REGISTERS = (
    r"needs 98,304 registers \(96 a thread\), and sm_90a has 65,536 a block; use at most 640 "
    r"threads, or compile with __launch_bounds__\(1024\)$"
)
COOPERATIVE = (
    r"cooperative grid of 793 blocks, and cuda\(\) holds 792 at once \(6 on each of 132 "
    r"multiprocessors\)"
)
FIXED = {"cluster": (2, 1, 1)}


def six_blocks(threads: int, shared: int) -> int:
    return 6


def test_each_limit_names_both_numbers():
    for where, kernel, launch, said in (
        (H, {}, (1, 2048), r"block.x is 2,048, and at most 1,024"),
        (H, {}, (1, (5, 205)), r"block \(5, 205, 1\) has 1,025 threads, and sm_90a allows 1,024"),
        (H, {}, (1, (1, 1, 65)), r"block.z is 65, and at most 64"),
        (H, {}, (1, 0), r"block.x is 0, and must be 1 or more"),
        (H, {}, ((1, 65536), 1), r"grid.y is 65,536, and at most 65,535 are allowed; put the larg"),
        (H, {}, ((1, 1, 65536), 1), r"grid.z is 65,536, and at most 65,535"),
        (H, {}, (2**31, 1), r"grid.x is 2,147,483,648, and at most 2,147,483,647"),
        (H, {"max_threads": 128}, (1, 129), r"129 threads, and the source promises at most 128"),
        (H, {"block": (64, 2, 1)}, (1, 64), r"block is \(64, 1, 1\), and the source fixes it at"),
        (H, {"registers": 96}, (1, 1024), REGISTERS),
        (H, {}, (1, 32, -1), r"shared is -1 bytes"),
        (
            DEVICE,
            {"shared_bytes": 40000},
            (1, 32, 200000),
            r"240,000 .*\(40,000 static, 200,000 dynamic\), and cuda\(\) has 232,448",
        ),
        (AMPERE, {}, (4, 32, 0, 2), "needs compute capability 9.0, and sm_80 has 8.0"),
        (H, {}, (16, 32, 0, 16), r"cluster \(16, 1, 1\) has 16 blocks, and at most 8"),
        (H, {}, ((4, 3), 32, 0, (2, 2)), r"grid.y is 3, which is no multiple of cluster.y = 2; r"),
        (H, FIXED, (4, 32, 0, 4), r"cluster is \(4, 1, 1\), and .* it at \(2, 1, 1\)"),
        (H, FIXED, (3, 32), r"grid.x is 3, which is no multiple of cluster.x = 2"),
        (DEVICE, {}, (793, 200, 0, None, True, six_blocks), COOPERATIVE),
        (
            DEVICE,
            {"local_bytes": LOCAL + 1},
            (1, 32),
            rf"{LOCAL + 1:,} bytes of local memory a thread, 1.26 GiB for the {THREADS:,} threads "
            r"that cuda\(\) can hold, and 1.26 GiB are free; make arrays in the kernel smaller",
        ),
    ):
        with naming(kernel, launch), pytest.raises(LaunchError, match=rf"^f: .*{said}"):
            limits.check(Kernel(**kernel), where, *launch)
    assert issubclass(LaunchError, ndl.CudaError)  # the next launch works
    assert not issubclass(LaunchError, ndl.CudaFatalError)


def test_a_launch_at_each_limit_fits():
    for where, kernel, launch, more in (
        (H, {}, ((2**31 - 1, 65535, 65535), (4, 4, 64)), {}),
        (H, {"registers": 96}, (1, 640), {}),
        (H, {"max_threads": 128}, (1, 128), {}),
        (DEVICE, {}, (1, 32, 232448), {}),
        (H, {}, (1, 32, 300000), {}),  # a device may have it
        (AMPERE, {}, (4, 32, 0, 1), {}),
        (H, {}, ((4, 2), 32, 0, (4, 2)), {}),
        (DEVICE, {}, (792, 200, 0, None, True, six_blocks), {}),
        (DEVICE, {"local_bytes": LOCAL}, (1, 32), {}),
        (DEVICE, {"local_bytes": LOCAL + 1}, (1, 32), {"held_local": LOCAL + 1}),
        (H, {"local_bytes": 500_000}, (1, 32), {}),
    ):
        with naming(kernel, launch):
            limits.check(Kernel(**kernel), where, *launch, **more)


def test_resident_blocks_are_counted_by_the_device():
    asked = []
    kernel = Kernel(shared_bytes=1000)
    count = lambda threads, shared: asked.append((threads, shared)) or 6
    report = limits.check(kernel, DEVICE, 1, (100, 2), 24, count_blocks=count)
    assert asked == [(200, 24)] and report.blocks_per_sm == 6 and report.resident == 792
    assert report.occupancy == 6 * 224 / 2048  # threads in warps
    alone = limits.check(kernel, H, 793, 200, cooperative=True)
    assert alone.blocks_per_sm is alone.occupancy is alone.resident is None


def test_wrong_sizes_are_named():
    for launch, error, said in (
        (("4", 32), TypeError, "f: grid: must be a whole number or .* up to three, not '4'"),
        ((4, (32, 1.0)), TypeError, "f: block: must be"),
        ((4, None), TypeError, "f: block: must be"),
        (((1, 1, 1, 1), 32), ValueError, "f: grid: 4 sizes"),
        ((4, ()), ValueError, "f: block: 0 sizes"),
        ((np.array([4, 2.5]), 32), TypeError, "f: grid: must be"),
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
    report = str(limits.check(kernel, DEVICE, (7, 2), 256, 24000, None, True, six_blocks))
    for said in ("scale<float> on cuda(): grid (7, 2, 1), block (256, 1, 1), cooperative\n",
                 "6 blocks a multiprocessor, 792 on the device: occupancy 75%", "40 registers",
                 "16 bytes of local memory", "25,000 bytes of shared memory"):  # fmt: skip
        assert said in report
    assert "occupancy" not in str(limits.check(kernel, H, (7, 2), 256, 24000))
