"""AsyncCopy: an array on its way to the host while the device works on."""

import numpy as np

from needle import _C


def test_copy_has_the_values_at_its_start(device):
    host = (np.arange(35).reshape(5, 7) % 5).astype(np.float32)
    for dtype in ("float32", "bfloat16", "int64", "bool"):
        array = _C.array(host, dtype=dtype, device=device)
        before = array.numpy()
        copied = _C.AsyncCopy(array)
        array.fill(1)  # queued after it
        arrived = copied.wait()
        assert arrived.device == _C.cpu() and arrived.dtype == dtype
        np.testing.assert_array_equal(arrived.numpy(), before)
        assert copied.wait() is arrived


def test_every_size_and_views(device):
    for shape in ((), (0,), (1,), (256,), (257,), (3, 0, 2), (1 << 20,), (31, 17)):
        array = _C.array(np.random.default_rng(0).standard_normal(shape), device=device)
        np.testing.assert_array_equal(_C.AsyncCopy(array).wait().numpy(), array.numpy())
    view, host = array[::-2, 3:].permute((1, 0)), array.numpy()
    np.testing.assert_array_equal(_C.AsyncCopy(view).wait().numpy(), host[::-2, 3:].T)


def test_many_under_way_and_the_array_gone(device):
    copies = [_C.AsyncCopy(_C.array([float(i)], device=device) + 1) for i in range(300)]
    values = [float(copied.wait()) for copied in reversed(copies)]
    assert values == [float(i + 1) for i in reversed(range(300))]
