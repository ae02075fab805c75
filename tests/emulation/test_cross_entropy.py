"""The cross-entropy of rows that begin anywhere, on the CPU (emulated.h), against float64."""

import numpy as np
import pytest
from test_hopper_linear import both_types, close, drawn
from words import call, from_16

pytestmark = pytest.mark.slow


@both_types
@pytest.mark.parametrize("columns", [29001, 28896])
def test_rows_of_a_block_begin_at_any_place(compiled, columns, is_half):
    """Two rows wait in shared memory. A block takes every third one here, so that a row of an odd
    size and the one that takes its place begin at different places of 16 bytes."""
    rows = 8
    (logits,) = drawn(is_half, ((rows, columns), 3))
    x = from_16(logits, is_half)
    targets = np.array([0, 5, columns - 1, -1, 17, columns - 9, 1000, columns // 2], np.int32)
    counts = targets >= 0
    losses, loss, share = (np.full(n, np.nan, np.float32) for n in (rows, 1, 1))
    call(
        compiled("cross_entropy", "both"),
        *(logits, targets, losses, loss, share, rows, columns, is_half, 1),
    )
    lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    wanted = np.exp(x - lse[:, None])
    wanted[counts, targets[counts]] -= 1
    wanted[~counts] = 0
    close(logits, wanted, is_half, "gradient")
    each = np.where(counts, lse - x[np.arange(rows), targets], 0)
    np.testing.assert_allclose(losses, each, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, each.sum() / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(share, 1 / counts.sum(), rtol=1e-6)
