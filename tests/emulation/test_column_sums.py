"""Sums of a layer that wait for one launch: the host's side of column_sums.cu on the CPU."""

import numpy as np
import pytest
from words import call

pytestmark = pytest.mark.slow

# Of each op: rows, columns, how many sums, the first row of the result, floats of scratch beside.
LAYER = [
    (64, 128, 2, 0, 0),  # the biases of both last products
    (0, 0, 0, 0, 5000),
    (32, 512, 1, 2, 0),
    (64, 384, 1, 3, 700_000),
    (256, 128, 4, 4, 0),
]
ALIKE = [(3, 40, 1, 0, 0), (5, 40, 1, 0, 9), (7, 40, 2, 1, 0)]
MANY = [(1 + i, 33, 3, 3 * (i % 3), 100 * i) for i in range(5)]


def sums(compiled, steps, *, hold=1, recorded=0, empties=0):
    """Return what the steps add to zeros, and the launches."""
    to, launched = np.zeros((9, 512), np.float32), np.zeros(1, np.int32)
    given = np.array(steps, np.int64), len(steps), to, 512, hold, recorded, empties, launched
    call(compiled("column_sums", "layer"), *given)
    return to, int(launched[0])


def wanted(steps):
    to = np.zeros((9, 512), np.float32)
    for number, (rows, columns, count, first, _) in enumerate(steps, 1):
        to[first : first + count, :columns] += rows * number
    return to


@pytest.mark.parametrize(
    "steps, least", [(LAYER, 1), (ALIKE, 2), (MANY, 2)], ids=["layer", "alike", "many"]
)
@pytest.mark.parametrize("empties", [0, 1])
def test_held_sums_are_added_once_each(compiled, steps, least, empties):
    """Also where scratch grows on the way, or is given back; after that a layer needs one launch,
    or one more for each sum into the same gradient and beyond 8 sums."""
    for _ in range(2):
        to, launches = sums(compiled, steps, empties=empties)
        np.testing.assert_array_equal(to, wanted(steps))
    assert launches == least or empties
    to, launches = sums(compiled, steps, hold=0)
    np.testing.assert_array_equal(to, wanted(steps))
    assert launches >= sum(count > 0 for _, _, count, _, _ in steps)


def test_a_recorded_layer_has_the_scratch_of_its_graph(compiled):
    for steps in LAYER, MANY, ALIKE:
        to, _ = sums(compiled, steps, recorded=1)
        np.testing.assert_array_equal(to, wanted(steps))
