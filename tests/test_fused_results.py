"""Fused ops with several results: what their backward is given."""

from typing import ClassVar

import numpy as np
import pytest

from needle import _C, Tensor, nn, ops
from needle.autograd import FusedTupleOp


class Halves(FusedTupleOp):
    """(x / 2, x, -x); keeps what its backward is given."""

    given: ClassVar[list] = []

    def compute(self, x):
        return _C.multiply(x, 0.5), x, _C.negate(x)

    def backward(self, dout, node, sinks):
        self.given.append([None if d is None else d.numpy().tolist() for d in dout])
        half, same, minus = (
            _C.multiply(node.inputs[0].cached_data, 0) if d is None else d for d in dout
        )
        return [_C.subtract(_C.add(_C.multiply(half, 0.5), same), minus)]


@pytest.mark.parametrize(
    "use, given, wanted",
    [
        (lambda half, same, minus: half, [[1, 1], None, None], 0.5),
        (lambda half, same, minus: minus, [None, None, [1, 1]], -1),
        (lambda half, same, minus: half + same * 3, [[1, 1], [3, 3], None], 3.5),
        (lambda half, same, minus: same + same, [None, [2, 2], None], 2),
        (lambda half, same, minus: half + half * 2 + minus, [[3, 3], None, [1, 1]], 0.5),
    ],
    ids=["the first", "the last", "two", "one twice", "one twice and another"],
)
def test_a_fused_op_of_several_results_is_told_which_were_used(use, given, wanted):
    for is_kept in (True, False):  # gradients in between, with a leaf that is no Parameter
        x = (Tensor if is_kept else nn.Parameter)(np.float32([4, 6]))
        Halves.given.clear()
        results = Halves()(x)
        use(*results).backward()
        assert Halves.given == [given]
        np.testing.assert_array_equal(x.grad.numpy(), [wanted, wanted])
        assert results.tuple()[1].cached_data is x.cached_data


def test_results_by_index_and_as_a_tuple_share_one_gradient():
    x = Tensor([4, 6])
    Halves.given.clear()
    results = Halves()(x)
    ops.stack([results[0] + results[0], *results], 0).sum().backward()
    assert Halves.given == [[[3, 3], [1, 1], [1, 1]]]
