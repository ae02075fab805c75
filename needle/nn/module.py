"""Module and Parameter: a model is attributes, its parameters are found by walking them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from needle import _C
from needle._C import Device, NDArray
from needle.autograd import Tensor
from needle.autograd.tensor import check_gradient
from needle.backend_ndarray import FLOAT_DTYPES, commit, device_and_dtype

P = ParamSpec("P")
Part = TypeVar("Part")
Result = TypeVar("Result", covariant=True)
M = TypeVar("M", bound="Module")


class HasForward(Protocol[P, Result]):
    """Tells type checkers that a module is called as its own `forward` is."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> Result: ...


class Parameter(Tensor):
    """A Tensor that is trained.

    After `flatten_parameters` its data is a view of the model's flat buffer and `grad_buffer`
    (float32, its shape) a view of the flat gradient: `.grad` is then a Tensor over that view, into
    which every backward() adds; setting `.grad` writes into it, None being zeros. After
    `reset_grad()` the next product writes instead of adding; an earlier read of `.grad` fills in
    zeros.

    A copy or a pickle stands alone, with values and gradient, until it is flattened itself.

    `name` is the parameter's name in the module whose parameters were listed last; optimizers keep
    their state under it.
    """

    trained = True
    name: str | None = None
    _grad: Tensor | None = None
    # Gives the FlatParameters of its buffers while they are referenced. A strong reference would
    # keep a dropped model's memory until the garbage collector runs.
    _flat: Callable[[], Any] = staticmethod(lambda: None)

    def fill_zeros(self) -> None:
        """Write the zeros that reset_grad() left to the next product."""
        if self.zeros_pending:
            self.raw_grad.fill(0)
            self.zeros_pending = False

    @property
    def grad_buffer(self) -> NDArray | None:  # type: ignore[override]
        self.fill_zeros()
        return self.raw_grad

    @grad_buffer.setter
    def grad_buffer(self, buffer: NDArray) -> None:
        self.raw_grad, self.zeros_pending, self.has_grad_buffer = buffer, False, True

    def reset_grad(self) -> None:
        """Set the gradient to zero, without a buffer to None."""
        self._grad, self.zeros_pending = None, self.has_grad_buffer

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        if self.has_grad_buffer:
            grad = Tensor.from_ndarray(self.grad_buffer)
            grad.in_grad_buffer = True
            return grad
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.reset_grad()
            return
        check_gradient("Parameter.grad", self, value)
        if self.has_grad_buffer:
            _C.assign(self.grad_buffer, value.cached_data)
        else:
            self._grad = value

    def __getstate__(self) -> dict[str, Any]:
        own = ("raw_grad", "zeros_pending", "has_grad_buffer", "post_accumulate_grad_hook", "_flat")
        state = {k: v for k, v in vars(self).items() if k not in own}
        return {**state, "_grad": self.grad}


class Parts(list[Part]):
    """A list from which `next()` takes the first item, as from PyTorch's iterators:
    `next(model.parameters()).device`."""

    def __next__(self) -> Part:
        if not self:
            raise StopIteration
        return self.pop(0)


def _to(place: str) -> Callable[[M], M]:
    def method(self: M) -> M:
        return self.to(place)

    method.__doc__ = f"`to({place!r})`."
    return method


class Module:
    """A part of a model. Subclasses write `forward`.

    Parameters and child modules are those in attributes, also inside dicts, lists and tuples; their
    names are the attribute names, keys and indices joined by dots. A Tensor in an attribute that
    is no Parameter and whose name does not begin with an underscore is a buffer (the running
    statistics of a batch norm): saved, not trained. `register_buffer` makes any name one.

    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    ...
    ...     def forward(self, x):
    ...         return self.layers[1](self.layers[0](x))
    >>> [name for name, _ in Twice().named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    """

    training: bool = True
    # The names that needle.hooks knows of this kind of module, in the order of computation: None
    # beside a point, where forward calls `self.hook(name, x)`; beside a name of modules below, the
    # attribute that holds the module or the list of them.
    hook_points: Mapping[str, str | None] = {}
    # (first, second): names of parameters below; place_neighbours and flatten_parameters let the
    # second follow the first in memory, so that one product can take both.
    neighbours: Sequence[tuple[str, str]] = ()
    # True in a class whose forward() may be computed in one op with its neighbours', from the
    # parameters. A subclass says so anew: it may compute something else.
    fuses: bool = False
    _hooks: Mapping[str, Sequence[Callable[[Tensor], Tensor]]] | None = None  # those in force
    _registered: Mapping[str, bool] = {}  # buffers of register_buffer, True for those saved

    def __init__(self) -> None:
        self.training = True

    def __call__(self: HasForward[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward is not defined")

    def __setattr__(self, name: str, value: Any) -> None:
        """TypeError for a constant in the place of a parameter, which would be trained no more."""
        if isinstance(value, Tensor) and isinstance(vars(self).get(name), Parameter):
            if value.op is None and not value.trained:
                raise TypeError(
                    f"{type(self).__name__}.{name}: is a Parameter, which a Tensor cannot replace: "
                    "wrap it in nn.Parameter, or set the parameter's data"
                )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """The tree of modules, with their settings and the shapes of their parameters."""
        size = sum(p.size for p in self.distinct_parameters())
        return "\n".join([f"{_label(self)}: {size:,} parameters", *_tree(self)])

    def hook(self, name: str, x: Tensor) -> Tensor:
        """Return x, or the result of the functions hooked at this point."""
        if self._hooks is not None:
            for function in self._hooks.get(name, ()):
                x = function(x)
        return x

    def is_hooked_at(self, *names: str) -> bool:
        """True if a function is hooked at one of these points: fused ops may then not hide it."""
        return self._hooks is not None and any(name in self._hooks for name in names)

    def has_hook_point(self, name: str) -> bool:
        """Return whether forward, as the module is now, reaches this point of `hook_points`."""
        return True

    # -- its parts

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Set an attribute that moves with the module and is not trained: a mask, a table. With
        `persistent` False it is not saved. TypeError for what is neither a Tensor nor None;
        KeyError for a name with a dot, and for that of another attribute.

        >>> layer = nn.Module()
        >>> layer.register_buffer("mask", ndl.tril(ndl.ones(2, 2)), persistent=False)
        >>> [name for name, _ in layer.named_buffers()], layer.state_dict()
        (['mask'], {})
        """
        if "." in name or (hasattr(self, name) and name not in self._registered):
            raise KeyError(f"register_buffer: {name} has a dot, or is another attribute's name")
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"register_buffer: {name} must be a Tensor, not {tensor!r:.40}")
        if tensor is not None and tensor.requires_grad:
            tensor = tensor.detach()
        self._registered = {**self._registered, name: persistent}
        setattr(self, name, tensor)

    def named_parameters(self) -> Parts[tuple[str, Parameter]]:
        """(name, parameter) in the order of definition; a shared one once, under its first name."""
        found = _once(_walk(self, "", set()), Parameter)
        for name, value in found:
            value.name = name
        return found

    def parameters(self) -> Parts[Parameter]:
        """Every parameter once, in the order of definition."""
        return Parts(p for _, p in self.named_parameters())

    def distinct_parameters(self) -> list[Parameter]:
        """The same; their names stay those that they have in a module around this one."""
        return [parameter for _, parameter in _once(_walk(self, "", set()), Parameter)]

    def named_buffers(self) -> Parts[tuple[str, Tensor]]:
        """(name, buffer) in the order of definition, also those that are not saved; a shared one
        once, under its first name."""
        tensors = _once(_walk(self, "", set()), Tensor)
        return Parts((name, x) for name, x in tensors if not isinstance(x, Parameter))

    def buffers(self) -> Parts[Tensor]:
        """Every buffer once, in the order of definition."""
        return Parts(buffer for _, buffer in self.named_buffers())

    def saved(self) -> dict[str, Tensor]:
        """Return by name all that a file holds: the parameters, and the buffers that are saved."""
        registered = ((path, module._registered) for path, module in self.named_modules())
        left_out = {_join(path, n) for path, own in registered for n in own if not own[n]}
        found = [*self.named_parameters(), *self.named_buffers()]
        return {name: x for name, x in found if name not in left_out}

    def named_modules(self) -> Parts[tuple[str, Module]]:
        """("", self) and every module below it with its name, each once."""
        return _once(_walk(self, "", set()), Module)

    def modules(self) -> Parts[Module]:
        """This module and every one below it, each once."""
        return Parts(module for _, module in self.named_modules())

    def train(self: M, mode: bool = True) -> M:
        """Training mode for this module and all below: dropout drops, batch norms look at the
        batch. With `mode` False evaluation mode."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self: M) -> M:
        """Evaluation mode for this module and all below."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Set whether the parameters below get gradients, and return this: False freezes it."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as an optimizer's reset_grad, which takes no account of
        `set_to_none`."""
        for p in self.parameters():
            p.reset_grad()

    def named_children(self) -> Parts[tuple[str, Module]]:
        """(name, module) of the modules directly below, also inside dicts, lists and tuples; a
        shared one once, under its first name."""
        return _once(_directly_below(contents(self), ""), Module)

    def children(self) -> Parts[Module]:
        """The modules directly below, each once."""
        return Parts(module for _, module in self.named_children())

    def apply(self: M, function: Callable[[Module], Any]) -> M:
        """Call `function` with every module below, then with this one, and return this."""
        for _, module in reversed(self.named_modules()):
            function(module)
        return self

    def to(self: M, device: Device | str | None = None, dtype: str | None = None) -> M:
        """Move parameters, gradients, buffers and other arrays to a device, cast parameters and
        buffers of floats to a dtype, `m.to("bfloat16")`, or both, and return this. Make optimizers
        and flat parameters afterwards: ValueError where parameters are flat already. TypeError for
        a dtype of no floats."""
        op = f"{type(self).__name__}.to"
        device, dtype = device_and_dtype(op, device, dtype)
        if dtype not in (None, *FLOAT_DTYPES):
            raise TypeError(f"{op}: dtype must be one of {', '.join(FLOAT_DTYPES)}, not {dtype!r}")
        if any(p.has_grad_buffer for p in self.distinct_parameters()):
            raise ValueError(
                f"{op}: the parameters are flat; move the module before "
                "nn.flatten_parameters or an AdamW of it"
            )
        for _, module in self.named_modules() if device is not None else ():
            for name, value in contents(module).items():
                moved = device if name == "device" else _moved(value, device)
                if name in vars(module):
                    setattr(module, name, moved)
        for _, value in _walk(self, "", set()) if dtype is not None else ():
            if isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES:
                value.cached_data = value.cached_data.astype(dtype)
        for _, module in self.named_modules():
            module.was_moved(dtype)
        return self

    def was_moved(self, dtype: str | None) -> None:
        """Take note that `to` has moved this module, or one around it, or cast it to a dtype."""

    cpu, cuda, half, bfloat16, float = map(_to, ("cpu", "cuda", "float16", "bfloat16", "float32"))

    # -- state

    def state_dict(self) -> dict[str, NDArray]:
        """The arrays of parameters and buffers by name. They are the module's own memory, not
        copies."""
        return {name: value.cached_data for name, value in Module.saved(self).items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy arrays (NDArray, Tensor or NumPy, of any dtype and device) into the parameters and
        buffers of the same names.

        ValueError lists all that is wrong before anything is loaded: wrong shapes, and when strict
        names that are missing or unexpected.
        """
        commit(self.load_changes(state, strict))

    def load_changes(
        self, state: Mapping[str, Any], strict: bool = True
    ) -> list[tuple[NDArray, Any, NDArray]]:
        """Return the changes of load_state_dict, for `backend_ndarray.commit`."""
        own = self.state_dict()
        check_arrays(f"{type(self).__name__}.load_state_dict", own, state, strict)
        return [
            (array, ..., _as_ndarray(state[name]).to(array.device))
            for name, array in own.items()
            if name in state
        ]


def check_arrays(
    op: str, own: Mapping[str, NDArray], given: Mapping[str, Any], strict: bool = True
) -> None:
    """Raise a ValueError of `op` that lists the arrays of `given` with other shapes than those of
    `own`, and where strict the names that one has alone."""
    problems = [f"{name} is missing" for name in own if strict and name not in given]
    problems += [f"{name} is unexpected" for name in given if strict and name not in own]
    for name in own.keys() & given.keys():
        shape = np.shape(given[name])
        if shape != own[name].shape:
            problems.append(f"{name} must have shape {own[name].shape}, but has {shape}")
    if problems:
        raise ValueError(f"{op}: " + "; ".join(sorted(problems)))


def fuses_as(layer: Any, *kinds: type[Module]) -> bool:
    """True if a layer is of one of these kinds and its own class says that it fuses."""
    return isinstance(layer, kinds) and vars(type(layer)).get("fuses", False)


def _moved(value: Any, device: Device) -> Any:
    """Return arrays, also in lists, tuples and dicts, on a device; Tensors, dicts and what is of
    another type than these stay the objects that they are."""
    if isinstance(value, NDArray):
        return value.to(device)
    if isinstance(value, Tensor):
        value.cached_data = value.cached_data.to(device)
        value.grad = None if value.grad is None else value.grad.to(device)
    if isinstance(value, dict):
        value.update({key: _moved(item, device) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        moved = [_moved(item, device) for item in value]
        return type(value)(moved) if type(value) in (list, tuple) else value
    return value


def _as_ndarray(value: Any) -> NDArray:
    value = getattr(value, "cached_data", value)
    return value if isinstance(value, NDArray) else _C.array(value, None, _C.cpu())


def _label(module: Module) -> str:
    """Linear(in_features=3, out_features=2, weight (3, 2), bias (1, 2))"""
    parts = []
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            parts.append(f"{name} {value.shape}")
        elif isinstance(value, (int, float, str)) and name != "training" and name[:1] != "_":
            parts.append(f"{name}={value!r}")
    return f"{type(module).__name__}({', '.join(parts)})"


def _tree(module: Module) -> list[str]:
    """A line for each module below; neighbours that look alike share theirs."""
    below = _directly_below(contents(module), "")
    parts = [(name, [_label(x), *_tree(x)]) for name, x in below if isinstance(x, Module)]
    out = []
    for (label, *lines), alike in groupby(parts, itemgetter(1)):
        names = [name for name, _ in alike]
        span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        out += [f"  {span}: {label}", *(f"  {line}" for line in lines)]
    return out


def contents(module: Module) -> dict[str, Any]:
    """Return by name the items of a module that is a list or a dict, and its attributes."""
    items = {str(i): x for i, x in enumerate(module)} if isinstance(module, list) else module
    return (items if isinstance(items, dict) else {}) | vars(module)


def _directly_below(
    items: Mapping[str, Any], prefix: str, owner: Module | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of modules and parameters, also inside dicts, lists and tuples, and of
    the buffers of the owner of these items."""
    for key, item in items.items():
        if isinstance(item, (Module, Parameter)):
            yield _join(prefix, str(key)), item
        elif isinstance(item, Tensor):
            is_plain = not key.startswith("_") and item.op is None
            if owner is not None and (is_plain or key in owner._registered):
                yield _join(prefix, key), item
        elif isinstance(item, (dict, list, tuple)) and item:
            inner = item if isinstance(item, dict) else {str(i): x for i, x in enumerate(item)}
            yield from _directly_below(inner, _join(prefix, str(key)))


def _walk(module: Module, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of every module, parameter and buffer, modules before their content."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield name, module
    for below, value in _directly_below(contents(module), name, module):
        if isinstance(value, Module):
            yield from _walk(value, below, seen)
        else:
            yield below, value


def _once(named: Iterable[tuple[str, Any]], kind: type[Part]) -> Parts[tuple[str, Part]]:
    """Return the pairs of this kind, each value once, under its first name."""
    found: dict[int, tuple[str, Part]] = {}
    for name, value in named:
        if isinstance(value, kind):
            found.setdefault(id(value), (name, value))
    return Parts(found.values())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
