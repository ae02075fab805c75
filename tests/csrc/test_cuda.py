"""Tests that need a GPU: sizes past 2^31, streams, resets, faults, precision."""

import gc
import re
import time

import numpy as np
import pytest
from harness import attended, device_of, python

import needle as ndl
from needle import _C, Tensor, ops
from needle.testing.layers import cross_entropy_fwd

pytestmark = pytest.mark.cuda
PAST = 2**31 + 4097  # more elements than an int counts


@pytest.fixture
def device():
    cuda = device_of("cuda")
    yield cuda
    gc.collect()
    cuda.empty_cache()


# ---- past 2^31 elements --------------------------------------------------------------------------


def filled(value, dtype: str, device, marks: dict):
    """PAST elements of this value, but for some, which are written through views."""
    array = _C.empty((PAST,), dtype, device)
    array.fill(value)
    for index, mark in marks.items():
        array[index] = mark
    return array


def values_at(array, places) -> list:
    return [array[at].numpy().item() for at in places]


def test_elementwise_past_two_to_the_31(device):
    x = filled(1, "bfloat16", device, {0: 3, 2**31 - 1: 5, 2**31: 7, PAST - 1: 9})
    places = 0, 1, 2**31 - 1, 2**31, 2**31 + 1, PAST - 1
    y = x + x
    assert values_at(y, places) == [6, 2, 10, 14, 2, 18]
    del y
    z = _C.add(x[::-1], 1.0)  # the strided path
    assert values_at(z, (PAST - 1, 0, PAST - 1 - 2**31, 5)) == [4, 10, 8, 2]


def test_reductions_past_two_to_the_31(device):
    x = filled(1, "uint8", device, {PAST - 2: 200})
    found = [int(op(x, 1).numpy()) for op in (_C.sum, _C.argmax, _C.max)]
    assert found == [PAST + 199, PAST - 2, 200]
    wide = x[: 2**31].reshape((2, 2**30))
    np.testing.assert_array_equal(_C.sum(wide, 1).numpy(), [2**30, 2**30])
    tall = x[: 2**31].reshape((2**30, 2))
    tall[2**30 - 1, 1] = 50
    assert values_at(_C.sum(tall, 1), (2**30 - 1, 7)) == [51, 2]


def test_assign_and_copies_past_two_to_the_31(device):
    to = filled(0, "uint8", device, {PAST - 3: 77, 2: 5})
    there = to.numpy()
    assert there[-3] == 77 and int(there.sum(dtype=np.int64)) == 82
    assert values_at(_C.array(there, dtype="uint8", device=device), [PAST - 3, 3]) == [77, 0]
    to[: 2**31] = to[PAST - 2**31 :]  # they overlap: a copy of 2 GiB in between
    assert values_at(to, (2**31 - 3, 2)) == [77, 0]
    low = _C.empty((PAST,), "bfloat16", device)
    _C.assign(low, to)  # converts
    assert values_at(low, [2**31 - 3]) == [77]


def test_cross_entropy_past_two_to_the_31(device):
    """The logits of 65,536 x 50,304."""
    rows, vocabulary = 2**31 // 50304 + 9, 50304
    block = np.random.default_rng(0).standard_normal((1, vocabulary)).astype(np.float32)
    row = _C.array(block, dtype="bfloat16", device=device)
    logits = _C.empty((rows, vocabulary), "bfloat16", device)
    _C.assign(logits, row)
    targets = np.full(rows, 17, np.int32)
    targets[-1] = 50303
    ids = _C.array(targets, dtype="int32", device=device)
    losses, _ = _C.cross_entropy_fwd(logits, ids)
    exact = cross_entropy_fwd(None, row.numpy().astype(float).repeat(2, 0), np.array([17, 50303]))[
        "losses"
    ]
    np.testing.assert_allclose(
        losses.numpy()[[0, -2, -1]], [exact[0], exact[0], exact[1]], rtol=1e-5
    )
    _C.cross_entropy_fwd_bwd(logits, ids)
    last = logits[rows - 1 :].numpy()[0]
    p = np.exp(row.numpy()[0].astype(float))
    p /= p.sum()
    p[50303] -= 1
    np.testing.assert_allclose(last, p, atol=2**-8)


@pytest.mark.parametrize("vocabulary", [20_001, 50_257])
def test_cross_entropy_of_rows_that_begin_anywhere(vocabulary, device):
    """More rows than two a block, of an odd size: the one that takes a row's place in shared memory
    may begin at another place of 16 bytes."""
    rows = 300
    made = np.random.default_rng(3).standard_normal((rows, vocabulary), np.float32)
    logits = _C.array(made, dtype="bfloat16", device=device)
    p = np.exp(logits.numpy().astype(np.float64))
    p /= p.sum(1, keepdims=True)
    p[:, 17] -= 1
    _C.cross_entropy_fwd_bwd(logits, _C.array([17] * rows, dtype="int32", device=device))
    np.testing.assert_allclose(logits.numpy(), p, rtol=2**-8, atol=1e-7)


def test_embedding_and_matmul_past_two_to_the_31(device):
    rows = 2**31 // 1024 + 3
    table = _C.empty((rows, 1024), "bfloat16", device)
    table.fill(0)
    table[rows - 1] = 2
    y = _C.embedding_fwd(_C.array([rows - 1, 0], dtype="int32", device=device), table)
    np.testing.assert_array_equal(y.numpy().sum(1), [2048, 0])
    ones = _C.empty((1024, 8), "bfloat16", device)
    ones.fill(1)
    product = table @ ones
    assert product[rows - 1].numpy()[0, 0] == 2048 and product[rows - 2].numpy()[0, 0] == 0
    y, mean, _ = _C.layernorm_fwd(
        table,
        _C.array(np.ones(1024), dtype="bfloat16", device=device),
        _C.array(np.zeros(1024), dtype="bfloat16", device=device),
        1e-5,
    )
    assert mean.numpy()[-1] == 2 and mean.numpy()[-2] == 0


# ---- the device ----------------------------------------------------------------------------------


def test_properties_and_events(device):
    facts = device.properties()
    assert (
        facts["total_bytes"] > 2**30
        and facts["processors"] > 0
        and facts["arch"] >= 80
        and facts["name"]
    )
    start, end = _C.Event(device), _C.Event(device)
    a = _C.array(np.ones((1024, 1024)), device=device)
    start.record()
    for _ in range(10):
        a = a @ a * 1e-4
    end.record()
    while not end.done():
        time.sleep(0.001)
    assert start.done() and device.stream != 0
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", facts["uuid"])
    assert 0 < start.elapsed(end) < 10_000
    with pytest.raises(ValueError, match="must have been recorded"):
        _C.Event(device).done()
    for one, other in ((start, _C.Event(device)), (_C.Event(device), end)):
        with pytest.raises(ValueError, match="must have been recorded"):
            one.elapsed(other)


def test_side_stream_is_ordered_by_events_alone(device):
    a = _C.array(np.eye(4096), device=device)
    end, beside, after = (_C.Event(device) for _ in range(3))
    with pytest.raises(ValueError, match="must have been recorded"):
        end.wait()
    device.synchronize()
    for _ in range(100):  # some 300 ms
        a = a @ a
    end.record()
    beside.record(side=True)
    while not beside.done():
        time.sleep(0.001)
    assert not end.done() and device.side_stream not in (0, device.stream)
    end.wait(side=True)
    after.record(side=True)
    while not after.done():
        time.sleep(0.001)
    assert end.done()
    for _ in range(100):
        a = a @ a
    end.record()
    end.wait(side=True)
    after.record(side=True)
    after.wait()
    beside.record()
    while not beside.done():
        time.sleep(0.001)
    assert after.done()


def test_tf32_is_off(device):
    """TF32 keeps 10 bits of each factor: 1 + 2^-12 would become 1."""
    a = np.full((256, 256), 1 + 2.0**-12)
    array = _C.array(a, device=device)
    np.testing.assert_allclose((array @ array).numpy(), a @ a, rtol=1e-6)
    tensors = [Tensor(x, device=device) for x in (a, a)]
    np.testing.assert_allclose(ops.linear(*tensors).numpy(), a @ a, rtol=1e-6)
    q = np.full((1, 64, 1, 64), 1 + 2.0**-12)
    lse = attended(_C.attention_fwd, *[_C.array(q, device=device)] * 3, 1.0, 0)[1].numpy()
    np.testing.assert_allclose(lse, 64 * (1 + 2.0**-12) ** 2 + np.log(64), rtol=2e-6)


def test_exchange_and_copies_between_devices(device):
    array = _C.array(np.ones((3, 4)), device=device)
    facts = array.permute((1, 0)).__cuda_array_interface__
    assert facts["shape"] == (4, 3) and facts["typestr"] == "<f4" and facts["data"][0] != 0
    assert array.__dlpack_device__()[0] == 2
    again = _C.from_dlpack(array)
    assert again._handle.ptr() == array._handle.ptr() and again.numpy().sum() == 12
    with pytest.raises((TypeError, BufferError)):
        memoryview(array)
    host = np.random.default_rng(0).standard_normal((31, 257)).astype(np.float32)
    there, here = _C.array(host, device=device), _C.array(host)
    for view in (np.s_[:], np.s_[::-1, ::2], np.s_[3:5]):
        moved = here[view].to(device)
        assert moved.device == device
        for got in (moved, there[view].to(ndl.cpu())):
            np.testing.assert_array_equal(got.numpy(), host[view])
    with pytest.raises(TypeError):
        here + there
    missing = ndl.cuda(sum(d.name == "cuda" for d in ndl.all_devices() if d.enabled()) + 7)
    assert device.enabled() and not missing.enabled()
    with pytest.raises(RuntimeError, match="no such device"):
        _C.empty((1,), "float32", missing)


def test_released_memory_serves_the_next_array_of_its_size(device):
    new = lambda size: _C.empty((size,), "uint8", device)
    gc.collect()
    device.empty_cache()
    before = device.memory_stats()
    first = new(100_003)
    place = first.data_ptr
    del first
    again, other, larger = new(100_003), new(100_003), new(100_004)
    assert again.data_ptr == place and len({x.data_ptr for x in (again, other, larger)}) == 3
    assert device.memory_stats()["live_bytes"] == before["live_bytes"] + 300_010
    del again, other, larger
    for size, count in (4 << 20, 40), (1 << 20, 40), (512, 3000):  # more than stay idle
        held = [new(size + i) for i in range(count)]
        del held
    assert device.memory_stats()["live_bytes"] == before["live_bytes"]
    device.empty_cache()
    assert device.memory_stats()["reserved_bytes"] <= before["reserved_bytes"]


# ---- reset and faults, in processes of their own -------------------------------------------------


RESET = """
import gc, numpy as np, needle as ndl
device = ndl.cuda()
old = ndl.NDArray(np.ones((3, 4)), device=device)
view = old[1:]
assert device.memory_stats()['live_bytes'] > 0
ndl.cuda_reset()
assert device.memory_stats()['live_bytes'] == 0
for use in (lambda: old + 1, old.numpy, lambda: view.sum(), lambda: old.fill(0)):
    try:
        use()
    except RuntimeError as error:
        assert 'reset' in str(error), error
    else:
        raise SystemExit('nothing was raised')
new = ndl.NDArray(np.ones((3, 4)), device=device)
assert (new + 1).numpy().sum() == 24
del old, view
gc.collect()
assert (new @ ndl.NDArray(np.ones((4, 2)), device=device)).numpy().sum() == 24
mask = ndl.BlockMask.local(40, 16, 16)
for _ in range(3):  # what masks and dilations keep for the device goes with it
    q = ndl.Tensor(np.ones((1, 40, 2, 8), np.float32), device=device)
    one = ndl.ops.block_sparse_attention(q, q, q, mask).numpy()
    two = ndl.ops.dilated_attention(q, q, q, segments=(8, 40), dilations=(1, 2)).numpy()
    assert np.allclose(one, 1) and np.allclose(two, 1)
    ndl.cuda_reset()
"""


def test_cuda_reset():
    """Arrays of before raise, new ones work, and dropping the old ones harms nothing."""
    done = python(RESET)
    assert done.returncode == 0, done.stderr


FAULT = """
import needle as ndl
from needle import _C
from harness import Foreign
array = ndl.NDArray([1.0, 2.0], device=ndl.cuda())
kept = ndl.NDArray([3.0], device=ndl.cuda())
wild = _C.from_dlpack(Foreign(array))
said = []
uses = [
    lambda: (wild.exp(), ndl.cuda().synchronize()),
    lambda: kept + 1,
    kept.numpy,
    ndl.cuda_reset,
]
for use in uses:
    try:
        use()
    except ndl.CudaFatalError as error:
        said.append(str(error))
    else:
        raise SystemExit('nothing was raised')
print(*said)
"""


def test_empty_cache_in_a_recorded_step_is_refused(device):
    """It would give away what the step still reads."""
    with pytest.raises(ValueError, match="empty_cache: a graph is being recorded"):
        _C.Graph(device, device.empty_cache)
    device.empty_cache()


def test_a_fatal_fault_ends_the_process():
    """A kernel reads memory without an owner, handed in through DLPack: the first error names the
    op, every later call repeats it, and the exit code is 75."""
    done = python(FAULT, NEEDLE_SYNC="1")
    assert done.returncode == 75, (done.returncode, done.stdout, done.stderr)
    assert "exp" in done.stdout
    assert done.stdout.lower().count("start") >= 4 and "checkpoint" in done.stdout


SYNC = (
    FAULT.partition("said = []")[0]
    + """
busy = _C.array([[1.0]], device=ndl.cuda()).broadcast_to((4096, 4096))
for _ in range(20):
    busy @ busy
_C.sync_each_op(not _C.sync_each_op(False))
try:
    wild.exp()
    print("passed the op")
    ndl.cuda().synchronize()
except ndl.CudaFatalError as error:
    print(error)
"""
)


@pytest.mark.parametrize("before, met_by", [("0", "exp: "), ("1", "passed the op")])
def test_sync_each_op_decides_which_op_raises(before, met_by):
    done = python(SYNC, NEEDLE_SYNC=before)
    assert done.returncode == 75, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.startswith(met_by), done.stdout


def test_memory_of_torch_waits_for_its_work_and_stays_until_ours_is_done():
    """Each has a stream of its own, and PyTorch gives freed memory out again at once."""
    torch = pytest.importorskip("torch")
    gpu = device_of("cuda")
    for seed in range(3):
        torch.cuda._sleep(100_000_000)  # some 50 ms
        given = torch.full((1 << 20,), seed + 1.0, device="cuda")
        array = _C.from_dlpack(given)
        np.testing.assert_array_equal(array.numpy(), np.float32(seed + 1))
        a = _C.empty((8192, 8192), "float32", gpu)
        a.fill(1.0)
        for _ in range(8):
            a = a @ a * (1 / 8192)
        copy = array + 0.0  # queued behind the products
        del array, given
        other = torch.full((1 << 20,), -1.0, device="cuda")
        torch.cuda.synchronize()
        np.testing.assert_array_equal(copy.numpy(), np.float32(seed + 1))
        del other
