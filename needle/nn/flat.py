"""Flat buffers: one for all parameters of a module, one for their gradients (docs/design.md)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from itertools import accumulate, groupby

from needle import _C
from needle._C import NDArray
from needle.backend_ndarray import zeros
from needle.nn.module import Module, Parameter

ALIGNMENT = 64  # elements: each parameter starts on a boundary that every vector load accepts


class FlatParameters:
    """The buffers that `flatten_parameters` made.

    data: (N,) in the model's dtype; grad: (N,) float32. Decayed parameters come first and fill
    data[:decay_size]. Parameter i is `parameters[i]`, named `names[i]`, at data[offsets[i]:] with
    its size; gaps between parameters are zero in both buffers and stay zero. Read `grad`
    again after each reset_grad(), which leaves the zeros to the next product.

    A deep copy or a pickle holds copies of the parameters, in new buffers with their values and
    gradients: together with the model, `copy.deepcopy((model, optimizer))`, it is the model's copy
    that the optimizer's copy trains.
    """

    def __init__(self, names: list[str], parameters: list[Parameter], decayed: int) -> None:
        """Move the parameters into new buffers in this order; the first `decayed` decay."""
        self.names, self.parameters, self.decayed = names, parameters, decayed
        sizes = [-(-p.size // ALIGNMENT) * ALIGNMENT for p in parameters]
        *self.offsets, end = accumulate(sizes, initial=0)
        self.decay_size = sum(sizes[:decayed])
        first = parameters[0]
        self.data = zeros((end,), first.dtype, first.device)
        self._grad = zeros((end,), "float32", first.device)
        # Matrices, and biases (1, out): zeros are left to the next product, which may write.
        self._zeroed_late = [p for p in self.parameters if p.ndim >= 2]
        # Vectors, to whose gradients kernels only add: zeros are written at once, by runs
        # [start, end), since vectors lie together as a rule.
        places = zip(parameters, self.offsets, [*self.offsets[1:], end])
        runs = [[*run] for late, run in groupby(places, lambda x: x[0].ndim >= 2) if not late]
        self._zeroed_now = [(run[0][1], run[-1][2]) for run in runs]
        for i, p in enumerate(parameters):
            place, grad = self.view(self.data, i), p.grad
            _C.assign(place, p.cached_data)
            p.cached_data = place
            p.grad_buffer = self.view(self._grad, i)
            if grad is not None:
                p.grad = grad
            p._grad = None  # it would be a second gradient, in memory of its own
            p._flat = weakref.ref(self)

    @property
    def grad(self) -> NDArray:
        for p in self._zeroed_late:
            if p.zeros_pending:
                p.fill_zeros()
        return self._grad

    def reset_grad(self) -> None:
        """Count all gradients as zeros."""
        for p in self._zeroed_late:
            p.zeros_pending = True
        for start, stop in self._zeroed_now:
            self._grad[start:stop].fill(0)

    @property
    def size(self) -> int:
        """Elements of each buffer, the gaps between parameters included."""
        return self.data.size

    def view(self, buffer: NDArray, i: int) -> NDArray:
        """The part of a flat buffer that belongs to parameter i, in its shape."""
        p = self.parameters[i]
        return buffer[self.offsets[i] : self.offsets[i] + p.size].reshape(p.shape)

    def __copy__(self) -> FlatParameters:
        return self  # a second object over the same buffers would be of no use

    def __reduce__(self) -> tuple:
        return FlatParameters, (self.names, self.parameters, self.decayed)

    def __repr__(self) -> str:
        return (
            f"FlatParameters({len(self.names)} parameters, {self.size} elements of "
            f"{self.data.dtype}, {self.decay_size} decayed)"
        )


def is_decayed(name: str, p: Parameter) -> bool:
    """Matrices and embeddings are, norms and biases are not; nn.Linear's bias is a row (1, out)."""
    return p.ndim >= 2 and name.rpartition(".")[2] != "bias"


def place_neighbours(module: Module) -> None:
    """Let the parameters of each pair of `Module.neighbours` of a module follow each other in
    memory, as flatten_parameters does. Values stay. Pairs that it would not join either, for their
    sizes, views, and parameters in its buffers stay where they are."""
    own = dict(module.named_parameters())
    for names in _neighbours(module).items():
        pair = [own[name] for name in names if name in own and not own[name].has_grad_buffer]
        if len(pair) < 2:
            continue
        a, b = (p.cached_data for p in pair)
        alike = (a.dtype, a.device) == (b.dtype, b.device) and a.size % ALIGNMENT == 0
        if not alike or not a.is_compact() or not b.is_compact() or a.joined(b) is not None:
            continue
        both = _C.empty((a.size + b.size,), a.dtype, a.device)
        for p, place in zip(pair, (both[: a.size], both[a.size :])):
            place = place.reshape(p.shape)
            _C.assign(place, p.cached_data)
            p.cached_data = place


def _neighbours(module: Module) -> dict[str, str]:
    """Map parameters to those that follow them, by name: `Module.neighbours` of all modules."""
    pairs = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        pairs |= {prefix + first: prefix + second for first, second in type(part).neighbours}
    return pairs


def _together(
    named: list[tuple[str, Parameter]], pairs: dict[str, str]
) -> list[tuple[str, Parameter]]:
    """Keep the order, but place each pair's second parameter right after its first, if both exist.
    The second of one pair may be the first of another."""
    there = dict(named)
    seconds = [second for first, second in pairs.items() if first in there]
    order: dict[str, Parameter] = {}
    for name in [*(name for name in there if name not in seconds), *seconds]:
        while name in there and name not in order:
            order[name] = there[name]
            name = pairs.get(name, "")
    return list(order.items())


def flatten_parameters(
    module: Module,
    decay: Callable[[str, Parameter], bool] = is_decayed,
    only: Collection[str] | None = None,
) -> FlatParameters:
    """Move the parameters of `module` that require gradients into one buffer, those for which
    `decay(name, parameter)` is true first, and give each a view of one float32 gradient buffer.
    Their order is otherwise that of `named_parameters()`, but for `Module.neighbours`. only: the
    names of those to move, where not all are.

    Values stay, gradients start at zero. A module that is flat already, in the same order, gives
    back the same object as long as it is referenced (by an optimizer). ValueError when the
    parameters differ in dtype or device, or there are none.

    >>> model = nn.Linear(3, 2)
    >>> flat = nn.flatten_parameters(model)
    >>> flat
    FlatParameters(2 parameters, 128 elements of float32, 64 decayed)
    >>> model(ndl.ones(1, 3)).sum().backward()
    >>> float(flat.grad.sum())
    8.0
    """
    wanted = (x for x in module.named_parameters() if only is None or x[0] in only)
    named = [(n, p) for n, p in wanted if p.requires_grad]
    if not named:
        raise ValueError("flatten_parameters: the module has no parameter that requires gradients")
    first_name, first = named[0]
    for name, p in named:
        if (p.dtype, p.device) != (first.dtype, first.device):
            raise ValueError(
                f"flatten_parameters: {name} is {p.dtype} on {p.device}, but {first_name} is "
                f"{first.dtype} on {first.device}; all must be alike"
            )
    chosen = [bool(decay(name, p)) for name, p in named]
    pairs = _neighbours(module)
    order = _together([x for x, d in zip(named, chosen) if d], pairs)
    order += _together([x for x, d in zip(named, chosen) if not d], pairs)
    decayed = sum(chosen)

    names, parameters = map(list, zip(*order))
    before = first._flat()
    alike = before is not None and [*map(id, before.parameters)] == [*map(id, parameters)]
    if alike and before.decayed == decayed and all(p._flat() is before for p in parameters):
        return before
    flat = FlatParameters(names, parameters, decayed)
    flat.reset_grad()
    return flat
