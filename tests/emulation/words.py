"""Arrays of 16-bit floats as the words that C sees, and calls of what is compiled."""

import ctypes

import numpy as np


def answer(function, *arguments) -> bytes:
    """What a function of C says of arguments, of which arrays are passed by their address."""
    is_array = lambda x: isinstance(x, np.ndarray)
    return function(*(ctypes.c_void_p(x.ctypes.data) if is_array(x) else x for x in arguments))


def call(function, *arguments) -> None:
    said = answer(function, *arguments)
    assert said == b"", said


def to_16(x: np.ndarray, is_half: bool) -> np.ndarray:
    if is_half:
        return x.astype(np.float16).view(np.uint16)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_16(bits: np.ndarray, is_half: bool) -> np.ndarray:
    if is_half:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def poison(shape: tuple[int, ...]) -> np.ndarray:
    """NaN in either type."""
    return np.full(shape, 0x7FC1, np.uint16)
