"""A case of an op: how its operands are drawn, its reference, its bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Maker = Callable[[np.random.Generator], Any]


@dataclass(frozen=True)
class Case:
    """An op with operands and a float64 reference. Bounded in the maximum norm by the sum of
    `terms` terms, or element by element where `ulps` is given."""

    op: str
    label: str
    inputs: Callable[[np.random.Generator], dict]  # operand name -> float64 array, number or None
    reference: Callable[..., dict]  # (r, **inputs) -> name of each OUT and IO operand -> array
    terms: float = 1  # terms that an element sums
    of_rounded: tuple[str, ...] = ()  # float32 results of numbers that were rounded to the dtype
    ulps: float | None = None
    unit: Callable | None = None  # (result, *inputs) -> the quantity that an ulp is of

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def cases_of(
    reference: Callable,
    inputs: Callable,
    shapes: dict[str, tuple] | Iterable[tuple],
    terms: Callable = lambda *shape: 1,
    of_rounded: tuple[str, ...] = (),
) -> list[Case]:
    """Make a case for each shape, of the op that `reference` is named after: `inputs(*shape)` and
    `terms(*shape)`. A shape's label is its numbers unless `shapes` is a dict of labels."""
    if not isinstance(shapes, dict):
        shapes = {"x".join(map(str, shape)): shape for shape in shapes}
    return [
        Case(reference.__name__, label, inputs(*shape), reference, terms(*shape), of_rounded)
        for label, shape in shapes.items()
    ]


def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Maker:
    """Make a maker of normally distributed numbers."""
    return lambda rng: rng.standard_normal(shape) * std + mean


def draw(**made: Any) -> Maker:
    """Make the inputs of a case from makers: a callable gets the generator, other values stay."""

    def inputs(rng):
        return {k: f(rng) if callable(f) else f for k, f in made.items()}

    return inputs


def targets(n: int, v: int, ignored: Iterable[int] = ()) -> Maker:
    """Make a maker of n classes below v; -100 at the places `ignored`."""

    def make(rng):
        t = rng.integers(0, v, n)
        t[list(ignored)] = -100
        return t

    return make
