"""The table of tensor maps that were made before, hopper.cpp on the CPU."""

import numpy as np
import pytest
from words import answer, call

pytestmark = pytest.mark.slow

SHAPE, STRIDES, BOX, SWIZZLE = [64, 128, 2, 3], [64, 8192, 16384], [64, 8, 1, 1], [128]
FIRST = SHAPE + STRIDES + BOX + SWIZZLE
CHANGED = [FIRST[:i] + [32 if i == 11 else x + 16] + FIRST[i + 1 :] for i, x in enumerate(FIRST)]


def test_a_map_is_encoded_once_for_each_key(compiled):
    """Each part of the key counts, and so does the address, also where keys share an entry."""
    memory = np.zeros(1 << 16, np.uint8)

    def made(given, at=0):
        found, count = np.zeros(16, np.int64), np.zeros(1, np.int32)
        call(compiled("maps", "byte_map"), memory[at:], np.array(given), found, count)
        assert found[0] == memory.ctypes.data + at
        np.testing.assert_array_equal(found[1:5], given[:4])
        np.testing.assert_array_equal(found[5:8], given[4:7])
        np.testing.assert_array_equal(found[8:10].view(np.int32), given[7:11])
        return int(count[0]), found.tobytes()

    for given in [FIRST, *CHANGED]:
        count, first = made(given)
        assert made(given) == (count, first)
    before = made(FIRST)[0]
    for _ in range(2):
        for at in range(0, memory.size, 16):
            made(FIRST, at)
    assert made(FIRST)[0] > before


def test_a_refused_map_is_not_kept(compiled):
    given = np.array([0, *FIRST[1:]]), np.zeros(16, np.int64), np.zeros(1, np.int32)
    for count in range(2):
        said = answer(compiled("maps", "byte_map"), np.zeros(16, np.uint8), *given)
        assert b"refuses (0, 128, 2, 3)" in said, count
