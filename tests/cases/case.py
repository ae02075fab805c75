"""A case of a structured op, and how its inputs are drawn."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    inputs: Callable[[np.random.Generator], dict]  # operand name -> float64 array, number or None
    reference: Callable[..., dict]  # (r, **inputs) -> name of each OUT and IO operand -> array
    terms: float = 1  # how many terms one element sums
    of_rounded: tuple[str, ...] = ()  # float32 results of what was rounded to the other dtype

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def cases_of(
    reference: Callable,
    inputs: Callable,
    shapes: dict[str, tuple] | Iterable[tuple],
    terms: Callable = lambda *shape: 1,
    of_rounded: tuple[str, ...] = (),
) -> list[Case]:
    """Cases of the op that `reference` is named after: for each shape, whose label is its numbers
    where it has no other, `inputs(*shape)` and `terms(*shape)`."""
    if not isinstance(shapes, dict):
        shapes = {"x".join(map(str, shape)): shape for shape in shapes}
    return [
        Case(reference.__name__, label, inputs(*shape), reference, terms(*shape), of_rounded)
        for label, shape in shapes.items()
    ]


def normal(*shape, mean=0.0, std=1.0):
    return lambda rng: rng.standard_normal(shape) * std + mean


def draw(**made):
    """inputs from makers: what is callable gets the generator, what is not is taken as it is."""

    def inputs(rng):
        return {k: f(rng) if callable(f) else f for k, f in made.items()}

    return inputs


def targets(n, v, ignored=()):
    def make(rng):
        t = rng.integers(0, v, n)
        t[list(ignored)] = -100
        return t

    return make
