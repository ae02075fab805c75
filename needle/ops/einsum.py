"""Products of vectors and einsum, by transposing, reshaping and matmul."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from needle.autograd import Tensor
from needle.backend_ndarray import listed
from needle.ops.broadcast import broadcast_to, reshape, summation
from needle.ops.common import check_tensors, normal_axis
from needle.ops.matmul import matmul
from needle.ops.shape import diagonal, permute

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a[i] b[j] of the flat elements of both."""
    return reshape(a, (a.size, 1)) * reshape(b, (1, b.size))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The product of two vectors, a number; of a matrix and a vector, or of two matrices, `matmul`.

    >>> print(ndl.dot(ndl.Tensor([1, 2]), ndl.Tensor([3, 4])))
    11.0
    """
    if a.ndim > 2 or b.ndim > 2:
        raise ValueError(f"dot: at most 2 axes, not {a.shape} and {b.shape}; see matmul and einsum")
    return matmul(a, b) if a.ndim and b.ndim else a * b


def tensordot(a: Tensor, b: Tensor, axes: Any = 2) -> Tensor:
    """The sum of products over the last `axes` axes of a and the first of b, or over pairs of axes,
    ([of a], [of b]).

    >>> ndl.tensordot(ndl.ones(2, 3, 4), ndl.ones(4, 5, 3), ([2, 1], [0, 2])).shape
    (2, 5)
    """
    if isinstance(axes, (int, np.integer)):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ValueError(f"tensordot: axes is {axes}, but a has {a.ndim} and b {b.ndim} axes")
        axes = range(a.ndim - axes, a.ndim), range(axes)
    if len(axes) != 2:
        raise ValueError(f"tensordot: axes must be a number or ([of a], [of b]), not {axes}")
    left, right = (
        [normal_axis("tensordot", i, x.ndim) for i in listed(of)] for of, x in zip(axes, (a, b))
    )
    if len({*left}) != len(left) or len({*right}) != len(right):
        raise ValueError(f"tensordot: an axis is named twice in {axes}")
    if len(left) != len(right):
        raise ValueError(f"tensordot: axes {axes} name {len(left)} axes of a and {len(right)} of b")
    first, second = LETTERS[: a.ndim], list(LETTERS[a.ndim : a.ndim + b.ndim])
    for i, j in zip(left, right):
        second[j] = first[i]
    return einsum(f"{first},{''.join(second)}", a, b)


def einsum(subscripts: str, *operands: Tensor) -> Tensor:
    """Einstein's sum by NumPy's rules: `"bij,bjk->bik"`. A letter names an axis, is summed over
    where the output lacks it, and takes the diagonal where an operand has it twice; `...` stands
    for axes that broadcast; without `->` the output has the letters that occur once, sorted.

    Operands are taken from left to right, two at a time. ValueError where letters do not fit.

    >>> x = ndl.Tensor([[1, 2], [3, 4]])
    >>> print(ndl.einsum("ij,j->i", x, ndl.Tensor([1, 1])), ndl.einsum("ii", x))
    [3. 7.] 5.0
    """
    check_tensors("einsum", **{f"operand {i}": x for i, x in enumerate(operands)})
    terms, output = _parsed(subscripts, [x.ndim for x in operands])
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands):
        own: dict[str, int] = {}
        for letter, n in zip(term, x.shape):
            known = sizes.setdefault(letter, n)
            if known == 1 and letter not in own:
                sizes[letter] = n
            elif n not in (1, known) or n != own.get(letter, n):
                raise ValueError(f"einsum: {subscripts!r}: axis {letter} is {n}, but was {known}")
            own[letter] = n
    tensors = []
    for i, (term, x) in enumerate(zip(terms, operands)):
        elsewhere = {*output}.union(*terms[:i], *terms[i + 1 :])
        tensors.append(_reduced(x, term, elsewhere, sizes))
    done, letters = tensors[0]
    for i in range(1, len(tensors)):
        later = {*output}.union(*terms[i + 1 :])
        done, letters = _contracted(done, letters, *tensors[i], later, sizes)
    return permute(done, [letters.index(letter) for letter in output])


def _parsed(subscripts: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the output; those of `...` are spare ones."""
    text = subscripts.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"einsum: {subscripts!r} names {len(terms)} operands, not {len(ndims)}")
    spare = [letter for letter in LETTERS if letter not in text]
    widths = [n - len(term.replace("...", "")) for term, n in zip(terms, ndims)]
    for term, width, n in zip(terms, widths, ndims):
        if width < 0 or (width and "..." not in term):
            raise ValueError(f"einsum: {subscripts!r}: {term!r} does not name {n} axes")
    most = max((w for term, w in zip(terms, widths) if "..." in term), default=0)
    dots = "".join(spare[:most])
    terms = [term.replace("...", dots[most - w :]) for term, w in zip(terms, widths)]
    if not arrow:
        plain = "".join(terms)
        once = sorted(letter for letter in {*plain} - {*dots} if plain.count(letter) == 1)
        output = dots + "".join(once)
    output = output.replace("...", dots)
    used = {*"".join(terms)}
    if not used <= {*LETTERS} or not {*output} <= used or len({*output}) < len(output):
        raise ValueError(
            f"einsum: {subscripts!r}: axes are letters, and the output has each once, of an operand"
        )
    return terms, output


def _reduced(
    x: Tensor, term: str, elsewhere: set[str], sizes: dict[str, int]
) -> tuple[Tensor, str]:
    """`x` with its full sizes and each letter once, summed over those that are not elsewhere."""
    x = broadcast_to(x, [sizes[letter] for letter in term])
    for letter in sorted({*term}):
        while term.count(letter) > 1:
            pair = term.index(letter), term.rindex(letter)
            x = diagonal(x, 0, *pair)
            term = "".join(c for i, c in enumerate(term) if i not in pair) + letter
    alone = tuple(i for i, c in enumerate(term) if c not in elsewhere)
    return summation(x, alone) if alone else x, "".join(c for c in term if c in elsewhere)


def _contracted(
    a: Tensor, left: str, b: Tensor, right: str, later: set[str], sizes: dict[str, int]
) -> tuple[Tensor, str]:
    """The product of two operands, summed over their common letters that nothing later needs."""
    batch = [c for c in left if c in right and c in later]
    summed = [c for c in left if c in right and c not in later]
    rows = [c for c in left if c not in right]
    columns = [c for c in right if c not in left]

    def matrices(x: Tensor, own: str, *groups: list[str]) -> Tensor:
        x = permute(x, [own.index(c) for group in groups for c in group])
        return reshape(x, [math.prod(sizes[c] for c in group) for group in groups])

    product = matmul(
        matrices(a, left, batch, rows, summed), matrices(b, right, batch, summed, columns)
    )
    letters = [*batch, *rows, *columns]
    return reshape(product, [sizes[c] for c in letters]), "".join(letters)
