"""needle/kernels/guard.py: guard bands, poison, and the description of faults."""

import numpy as np
import pytest
from harness import naming

from needle.kernels import guard
from needle.kernels.guard import GUARD, Place

ARRAYS = [
    ("x", "float32", (5, 3), "const"),
    ("y", "bfloat16", (7,), "out"),
    ("n", "uint8", (2, 2), "inout"),
    ("none", "int64", (0, 4), "out"),
    ("s", "float32", (), "in"),
]


@pytest.fixture
def filled():
    """(places, a buffer with its arrays)."""
    places, size = guard.lay_out(ARRAYS)
    memory = np.zeros(size, np.uint8)
    guard.poison(memory, places)
    for place in places:
        if place.role != "out":
            place.array_of(memory)[...] = 3
    return places, memory


def place_of(places: list[Place], name: str) -> Place:
    return next(place for place in places if place.name == name)


def write_all(places, memory) -> np.ndarray:
    """Result of a right kernel."""
    after = memory.copy()
    for place in places:
        if place.role == "out":
            place.array_of(after)[...] = 1
    return after


def test_every_array_has_a_band_on_both_sides_and_starts_aligned(filled):
    places, memory = filled
    bands = guard.bands(places, memory.size)
    assert len(bands) == len(places) + 1
    for start, stop in bands:
        assert stop - start >= GUARD
    assert all(place.start % 256 == 0 for place in places)
    assert [place.nbytes for place in places] == [60, 14, 4, 0, 4]
    assert [place.array_of(memory).shape for place in places] == [a[2] for a in ARRAYS]


def test_the_pattern_is_nan_and_never_the_same(filled):
    places, memory = filled
    for start, stop in guard.bands(places, memory.size):
        even = memory[start + start % 2 : stop - stop % 2]
        assert np.isnan(even.view(np.float16)).all()
        words = even[: even.size // 4 * 4].view(np.uint32)
        assert np.isnan(words.view(np.float32)).all()
        assert (words.view(np.int32) < 0).all()
    first, second = (memory[a:b][:GUARD] for a, b in guard.bands(places, memory.size)[:2])
    assert (first != second).mean() > 0.4
    again = memory.copy()
    guard.poison(again, places)
    assert (again != memory).any()


def test_a_write_outside_is_named(filled):
    after_end, before_start = "2 bytes were written after its end, the first ", "2 bytes were "
    before_start += "written before its start, the nearest "
    const = "the kernel takes it as const, and 1 of 15 elements were changed, the first at "
    for name, edge, offset, said in (
        ("y", "stop", 0, f"{after_end}0 bytes after it (element 7 of 7)"),
        ("y", "stop", 100, f"{after_end}100 bytes after it (element 57 of 7)"),
        ("s", "stop", 4, f"{after_end}4 bytes after it (element 2 of 1)"),
        ("s", "stop", GUARD - 2, f"{after_end}65,534 bytes after it (element 16,384 of 1)"),
        ("y", "start", -2, f"{before_start}1 bytes before it (element -1)"),
        ("x", "start", -8, f"{before_start}7 bytes before it (element -2)"),
        ("x", "start", -GUARD, f"{before_start}65,535 bytes before it (element -16384)"),
        ("x", "start", 4, f"{const}[0, 1]"),
        ("x", "start", 58, f"{const}[4, 2]"),
    ):
        with naming(name, edge, offset):
            places, memory = filled
            after = write_all(places, memory)
            first = getattr(place_of(places, name), edge) + offset
            after[first : first + 2] ^= 0x55
            assert guard.written_outside(memory, after, places) == f"{name}: {said}"


def test_two_faults_are_both_named(filled):
    places, memory = filled
    after = write_all(places, memory)
    after[place_of(places, "x").stop] ^= 1
    after[place_of(places, "s").stop] ^= 1
    assert guard.written_outside(memory, after, places).count(" after its end") == 2


def test_unwritten_elements_are_found_by_two_runs(filled):
    """An element that the kernel leaves out is a suspect both times; one that happens to be written
    with what the poison was is a suspect once."""
    places, memory = filled
    y = place_of(places, "y")
    lucky = y.array_of(memory)[5]

    def kernel(before):
        after = write_all(places, before)
        y.array_of(after)[5] = lucky
        y.array_of(after)[3] = y.array_of(before)[3]
        return after

    first = guard.suspects(memory, kernel(memory), places)
    assert {k: list(v) for k, v in first.items()} == {1: [3, 5]}
    other = guard.complement(memory, places)
    for place in places:
        same = place.bytes_of(memory) == place.bytes_of(other)
        assert not same.any() if place.role == "out" else same.all()
    again = guard.suspects(other, kernel(other), places)
    said = "y: 1 of 7 elements were not written, the first at [3]"
    assert guard.unwritten(first, again, places) == said
    assert guard.unwritten({1: np.array([5])}, again, places) is None
    assert guard.unwritten(first, {}, places) is None
