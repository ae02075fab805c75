"""needle/kernels/kernel.py, csrc/python/kernel.c and cuda/module.cpp on a GPU: launches, limits,
graphs, lifetimes, faults."""

import gc
import re

import numpy as np
import pytest
from harness import python
from kernel_sources import SOURCE, needs_nvrtc

import needle as ndl
from needle import _C, kernels
from needle.kernels import LaunchError

pytestmark = [pytest.mark.cuda, needs_nvrtc]

OWN = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

extern __shared__ float held[];
__global__ void reversed(const float *x, float *y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = held[n - 1 - i];
}

__global__ void shape(int *y) {
    unsigned cx, cy;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(cx));
    asm volatile("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(cy));
    int all[6] = {(int)gridDim.x, (int)gridDim.y, (int)gridDim.z, (int)blockDim.x, (int)cx,
                  (int)cy};
    for (int i = 0; i < 6; i++) y[i] = all[i];
}

__global__ void total(const int *x, int *parts, int n) {
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = blockIdx.x; i < n; i += gridDim.x) sum += x[i];
        parts[blockIdx.x] = sum;
    }
    cg::this_grid().sync();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < gridDim.x; i++) sum += parts[i];
        parts[0] = sum;
    }
}

__global__ void double_it(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}

__global__ void spin(float *x, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    x[0] += 1;
}

__global__ void many_registers(float *x) {
    float a[160];
    for (int k = 0; k < 160; k++) a[k] = x[k * 64 + threadIdx.x];
    __syncthreads();
    for (int r = 0; r < 3; r++)
        for (int k = 0; k < 160; k++) a[k] = a[k] * a[(k + 7) % 160] + 1;
    for (int k = 0; k < 160; k++) x[k * 64 + threadIdx.x] = a[k];
}
"""


@pytest.fixture
def device():
    return ndl.cuda()


@pytest.fixture
def own(device):
    names = "reversed shape total double_it spin many_registers"
    return kernels.compile(OWN, names.split())


def array(values, dtype="float32"):
    return _C.array(np.asarray(values), dtype=dtype, device=ndl.cuda())


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, name",
    [("float32", "float"), ("float16", "__half"), ("bfloat16", "__nv_bfloat16"), ("int32", "int"),
     ("uint8", "unsigned char")],
)  # fmt: skip
def test_templates_in_every_dtype(device, dtype, name):
    """y = s x + shift, rounded once from float32; the struct goes by value."""
    kernel = kernels.compile(SOURCE, [f"scale<{name}>"])[f"scale<{name}>"]
    values = np.arange(1000) % 25
    x, y = array(values, dtype), array(np.zeros(1000), dtype)
    affine = np.array([(3, 0.0)], dtype=np.dtype("i4,f8", align=True))[0]
    kernel(4, 256, x, y, 2.5, 1000, affine)
    want = _C.array(values * 2.5 + 3, dtype="float32", device=device)
    want = np.trunc(want.numpy()) if dtype in ("int32", "uint8") else want.astype(dtype).numpy()
    np.testing.assert_array_equal(y.numpy(), want)


def test_launches_stand_in_needles_stream(own):
    """Launches run after earlier work and before later work; nothing is waited for."""
    x = array(np.ones(1 << 20))
    for i in range(20):
        own["double_it"](4096, 256, x, 1 << 20)
        x += 1.0
        if i == 10:
            own["spin"](1, 1, array([0.0]), 10_000_000)
    want = 1.0
    for _ in range(20):
        want = want * 2 + 1
    np.testing.assert_array_equal(x.numpy(), np.full(1 << 20, want, np.float32))


# ---- limits of the device ------------------------------------------------------------------------


def test_block_that_just_fits_by_registers_runs(own):
    """The most that the check allows, and it is no more than the hardware does."""
    wide = own["many_registers"]
    x = array(np.zeros((160, 64)))
    for threads in (32, 64):
        wide(1, threads, x)
    x.numpy()
    with pytest.raises(LaunchError) as raised:
        wide.check(1, 1024)
    most = int(re.search(r"at most (\d+) threads", str(raised.value))[1])
    wide.check(1, most)
    wide(1, most, array(np.zeros(160 * 1024)))
    ndl.cuda().synchronize()
    with pytest.raises(LaunchError):
        wide.check(1, most + 1)


def test_shared_memory_is_opted_in(own, device):
    most = device.limits()["block_shared"]
    for size in (4 << 10, 48 << 10, 49 << 10, most):
        x, y = array(np.arange(size // 4)), array(np.zeros(size // 4))
        own["reversed"](1, 256, x, y, size // 4, shared=size)
        np.testing.assert_array_equal(y.numpy(), np.arange(size // 4)[::-1])
    with pytest.raises(LaunchError, match=f"{most + 1:,}, and .* allows {most:,}"):
        own["reversed"](1, 256, x, y, size // 4, shared=most + 1)


def test_clusters(own, device):
    if device.limits()["arch"] < 90:
        pytest.skip("clusters need compute capability 9.0")
    y = array(np.zeros(6), "int32")
    for cluster, want in ((1, [1, 1]), (8, [8, 1]), ((4, 2), [4, 2]), ((2, 2, 2), [2, 2])):
        own["shape"]((8, 4, 2), 32, y, cluster=cluster)
        np.testing.assert_array_equal(y.numpy(), [8, 4, 2, 32, *want])
    with pytest.raises(LaunchError, match="grid.x is 9, which is no multiple of cluster.x = 2"):
        own["shape"](9, 32, y, cluster=2)
    fixed = kernels.compile(
        "__global__ void __cluster_dims__(2, 1, 1) f(int *y) "
        '{ asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(y[0])); }'
    )["f"]
    fixed(4, 32, y)
    assert y.numpy()[0] == 2


def test_cooperative_grids(own, device):
    x, kernel = array(np.arange(10_000), "int32"), own["total"]
    most = kernel.check(1, 128, cooperative=True).resident
    for blocks in (1, 7, most):
        parts = array(np.zeros(blocks), "int32")
        kernel(blocks, 128, x, parts, 10_000, cooperative=True)
        assert parts.numpy()[0] == 10_000 * 9_999 // 2
    with pytest.raises(LaunchError, match=f"of {most + 1:,} blocks, and .* holds {most:,} at once"):
        kernel(most + 1, 128, x, x, 0, cooperative=True)


# ---- graphs and lifetimes ------------------------------------------------------------------------


def test_module_that_goes_while_a_graph_is_captured(device):
    x = array(np.zeros(4))
    built = kernels.build("__global__ void bump(float *x) { x[threadIdx.x] += 1; }")
    spare = [kernels.load(built, device)]

    def step():
        x.fill(3)
        spare.pop()
        gc.collect()

    graph = _C.Graph(device, step)
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.full(4, 3))
    kernels.load(built, device)["bump"](1, 4, x)
    assert x.numpy()[0] == 4


# ---- faults, in processes of their own -----------------------------------------------------------


@pytest.mark.parametrize("sync", ["0", "1"])
def test_fault_ends_the_process(sync):
    code = """
import numpy as np, needle as ndl
from needle import _C, kernels
source = "__global__ void wild(float *x, long long far) { x[far] = 1; }"
wild = kernels.compile(source)["wild"]
x = _C.array(np.zeros(4), device=ndl.cuda())
for use in (lambda: (wild(1, 1, x, 1 << 40), x.numpy()), lambda: wild(1, 1, x, 0),
            lambda: kernels.compile(source), lambda: wild.check(1, 1)):
    try:
        use()
    except ndl.CudaFatalError as error:
        print(error)
    else:
        raise SystemExit("nothing was raised")
"""
    done = python(code, NEEDLE_SYNC=sync)
    assert done.returncode == 75, (done.returncode, done.stdout, done.stderr)
    assert "illegal memory access" in done.stdout
    assert done.stdout.startswith("wild: ") == (sync == "1")
