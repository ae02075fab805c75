"""Optimizers and learning-rate schedules; clipping is in nn/utils.py.

An optimizer takes the parameters in one of four forms: a list of Parameters, a list of (name,
Parameter), a list of groups (dicts with "params" and, where they differ, "lr" and
"weight_decay"), or what `nn.flatten_parameters` returned. It never writes into `.grad`; a parameter
without a gradient is left alone. `lr` may be set between steps.

    for step in range(1, steps + 1):
        optimizer.lr = schedule(step)
        optimizer.reset_grad()
        loss.backward()
        norm, scale = grad_norm(flat, 1.0)
        optimizer.step(scale)
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from needle import _C
from needle._C import NDArray
from needle.autograd import Tensor
from needle.backend_ndarray import commit, zeros
from needle.nn import FlatParameters
from needle.nn.module import check_arrays
from needle.nn.utils import clip_grad_norm, grad_norm  # noqa: F401  names of this file too

OWN = ("lr", "weight_decay")  # what a group of parameters may have of its own
Params = Any  # Iterable[Parameter] | Iterable[tuple[str, Parameter]] | list[dict] | FlatParameters


def _check(owner: str, name: str, value: Any) -> None:
    """Raise ValueError for a hyperparameter with which no step makes sense."""
    below_one = name in ("momentum", "beta1", "beta2")
    if not 0 <= value < (1 if below_one else math.inf):
        kind = "in [0, 1)" if below_one else "finite and not negative"
        raise ValueError(f"{owner}: {name} must be {kind}, but is {value!r:.40}")


class Optimizer:
    """The parameters, their names, and state that is saved by name: the base of all optimizers.

    `step()` is atomic: whatever needs memory is made before the first change.

    Names are those of the pairs or of the flat object, else the ones that the module's
    `parameters()` gave, else ordinals "0", "1", ... A list takes a state with ordinals by place.
    """

    hyperparameters: tuple[str, ...] = ("lr",)
    slots: tuple[str, ...] = ()  # names of the float32 arrays kept for each parameter

    lr: float  # and of these the ones that `hyperparameters` names
    momentum: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def __init__(self, params: Params) -> None:
        self.flat: FlatParameters | None = None
        self.t = 0  # steps done
        self._own: dict[str, dict[str, Any]] = {}  # name: settings of its group
        self._group: list[int] = []  # of each parameter: the number of its group
        if isinstance(params, FlatParameters):
            self.flat = params
            named = list(zip(params.names, params.parameters))
            self._group = [0] * len(named)
            self._own = {name: {} for name in params.names}
        else:
            if isinstance(params, Tensor):
                raise TypeError(
                    f"{type(self).__name__}: params must be a list, not a {type(params).__name__}"
                )
            named = self._named(list(params))
        if not named:
            raise ValueError(f"{type(self).__name__}: there are no parameters")
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self._steps = dict.fromkeys(self.names, 0)  # of each parameter, those with a gradient
        if len({id(p) for p in self.params}) != len(self.params):
            raise ValueError(f"{type(self).__name__}: a parameter is given twice")

    def _named(self, params: list) -> list[tuple[str, Tensor]]:
        entries: list[tuple[str | None, Tensor, dict]] = []
        for number, item in enumerate(params):
            group = item if isinstance(item, dict) else {"params": [item]}
            own = {k: v for k, v in group.items() if k != "params"}
            if "params" not in group or not own.keys() <= {*OWN}:
                raise ValueError(
                    f"{type(self).__name__}: a group has 'params' and may have 'lr' and "
                    f"'weight_decay', but this one has {sorted(group)}"
                )
            members = group["params"]
            for member in [members] if isinstance(members, Tensor) else members:
                name, p = member if isinstance(member, tuple) else (None, member)
                if not isinstance(p, Tensor):
                    raise TypeError(
                        f"{type(self).__name__}: params must hold Parameters, "
                        f"not {type(p).__name__}"
                    )
                if p.op is not None:
                    raise ValueError(
                        f"{type(self).__name__}: params must hold Parameters, not the result of "
                        f"{type(p.op).__name__}, which would not be trained"
                    )
                entries.append((name or getattr(p, "name", None), p, own))
                self._group.append(number if group is item else 0)
        names = [name for name, _, _ in entries]
        if None in names or len(set(names)) != len(names):
            names = [str(i) for i in range(len(entries))]
        self._own = {str(name): own for name, (_, _, own) in zip(names, entries)}
        return [(str(name), p) for name, (_, p, _) in zip(names, entries)]

    def _set(self, betas: tuple[float, float] | None = None, **settings: float) -> None:
        """Take the hyperparameters, `betas` in the place of beta1 and beta2; ValueError where one
        of them, or of a group's own, is one with which no step makes sense."""
        if betas is not None:
            settings["beta1"], settings["beta2"] = betas
        for group in (settings, *self._own.values()):
            for name, value in group.items():
                _check(type(self).__name__, name, value)
        for name, value in settings.items():
            setattr(self, name, value)

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        raise NotImplementedError(f"{type(self).__name__}.step is not defined")

    def _next_steps(self) -> dict[str, int]:
        """The number of the next step of each parameter that has a gradient, by name: its own
        count, by which Adam corrects the bias."""
        named = zip(self.names, self.params)
        return {name: self._steps[name] + 1 for name, p in named if p.grad is not None}

    def reset_grad(self) -> None:
        """Drop the gradients: those of a flat object count as zeros, each other `.grad` is None."""
        if self.flat is not None:
            self.flat.reset_grad()
        else:
            for p in self.params:
                p.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """PyTorch's name of reset_grad, which takes no account of `set_to_none`."""
        self.reset_grad()

    @property
    def param_groups(self) -> list[ParamGroup]:
        """PyTorch's groups: those given, and of a group the parameters with the same settings.
        `group["lr"] = 0.1` sets the rate of these alone in the optimizer."""
        groups: list[ParamGroup] = []
        for number, name, p in zip(self._group, self.names, self.params):
            own = self._own[name]
            key = (number, dict(own))
            group = next((group for group in groups if group.key == key), None)
            if group is None:
                settings = {n: own.get(n, getattr(self, n)) for n in self.hyperparameters}
                group = ParamGroup(vars(self), key, settings)
                groups.append(group)
            group["params"].append(p)
            group.own.append(own)
        for group in groups:
            group.others = [own for other in groups if other is not group for own in other.own]
        return groups

    # -- state

    def _arrays(self) -> dict[str, NDArray]:
        """The kept arrays under "<slot>.<parameter>", in the parameters' shapes."""
        raise NotImplementedError(f"{type(self).__name__}._arrays is not defined")

    def state_dict(self) -> dict[str, Any]:
        """{"step": steps done, "arrays": {name: NDArray}, the hyperparameters, "groups": the
        settings of parameters that have their own, and "steps": those of parameters that had no
        gradient in some}. The arrays are the optimizer's own memory; apart from them everything is
        plain numbers and strings."""
        state: dict[str, Any] = {"step": self.t, "arrays": self._arrays()}
        state.update({name: getattr(self, name) for name in self.hyperparameters})
        state["groups"] = {name: dict(own) for name, own in self._own.items() if own}
        state["steps"] = {name: steps for name, steps in self._steps.items() if steps != self.t}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, from any device. ValueError lists all that does not fit
        before anything is loaded."""
        commit(self.load_changes(state))

    def load_changes(self, state: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
        """Return the changes of load_state_dict, for `backend_ndarray.commit`."""
        op, own = f"{type(self).__name__}.load_state_dict", self._arrays()
        names = self._names_in(state)
        split = {key: key.partition(".") for key in state["arrays"]}
        arrays = {
            f"{slot}.{names.get(name, name)}": state["arrays"][key]
            for key, (slot, _, name) in split.items()
        }
        check_arrays(op, own, arrays)
        for name in ("step", *self.hyperparameters):
            if name not in state:
                raise ValueError(f"{op}: {name} is missing")
        changes: list[tuple[Any, Any, Any]] = [
            (array, ..., arrays[name].to(array.device)) for name, array in own.items()
        ]
        changes += [(vars(self), name, state[name]) for name in self.hyperparameters]
        if "groups" in state:
            groups = {names.get(name, name): group for name, group in state["groups"].items()}
            own_settings = {name: dict(groups.get(name, {})) for name in self.names}
            changes.append((vars(self), "_own", own_settings))
        steps = dict.fromkeys(self.names, int(state["step"]))
        steps |= {names.get(name, name): n for name, n in state.get("steps", {}).items()}
        return [*changes, (vars(self), "_steps", steps), (vars(self), "t", int(state["step"]))]

    def _names_in(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Map the names of a state to those here, where either are ordinals: a list of parameters
        has names only if its module was asked for them before."""
        theirs = {key.partition(".")[2] for key in state["arrays"]}
        ordinals = [str(i) for i in range(len(self.names))]
        if self.flat is None and theirs == {*ordinals}:
            return dict(zip(ordinals, self.names))
        named = zip(self.params, self.names) if self.names == ordinals else ()
        return {getattr(p, "name", None): name for p, name in named}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)}" for name in self.hyperparameters)
        return f"{type(self).__name__}({len(self.params)} parameters, step {self.t}, {values})"


class ParamGroup(UserDict):
    """An entry of `param_groups`: "params" and the hyperparameters, which can be set. KeyError for
    another name, ValueError for a value with which no step makes sense."""

    def __init__(self, optimizer: dict, key: tuple, settings: dict[str, Any]) -> None:
        self.optimizer, self.key = optimizer, key
        self.own: list[dict[str, Any]] = []  # of each parameter: the settings of its group
        self.others: list[dict[str, Any]] = []  # those of the parameters of other groups
        self.data = {"params": [], **settings}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.data or name == "params":
            raise KeyError(f"param_groups: {name!r} is none of {[*self.data][1:]}")
        _check("param_groups", name, value)
        self.data[name] = value
        if name in OWN and not self.own[0]:  # the others keep what they had of the optimizer
            for other in self.others:
                other.setdefault(name, self.optimizer[name])
        for own in self.own:
            (own if own and name in OWN else self.optimizer)[name] = value


class _PerParameter(Optimizer):
    """An optimizer that walks the parameters one by one, in float32 array arithmetic. During a step
    there are the new values and state beside the old ones."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.state: dict[str, list[NDArray]] = {slot: [] for slot in self.slots}
        for kept in self.state.values():
            for p in self.params:
                kept.append(zeros(p.shape, "float32", p.device))

    def _updated(self, i: int, p: Tensor, g: NDArray, t: int, lr: float) -> tuple[NDArray, ...]:
        """Parameter i after its step t, given its gradient in float32: its values, and each
        slot."""
        raise NotImplementedError

    def step(self) -> None:
        steps = self._next_steps()
        changes: list[tuple[Any, Any, Any]] = [
            (vars(self), "t", self.t + 1),
            (vars(self), "_steps", self._steps | steps),
        ]
        for i, (name, p) in enumerate(zip(self.names, self.params)):
            if name not in steps:
                continue
            g, own = p.grad.cached_data.astype("float32"), self._own[name]
            decay = own.get("weight_decay", self.weight_decay)
            if decay:
                g = g + decay * p.cached_data.astype("float32")
            new, *kept = self._updated(i, p, g, steps[name], own.get("lr", self.lr))
            changes.append((p.cached_data, ..., new.astype(p.dtype)))
            changes += [(self.state[slot], i, array) for slot, array in zip(self.slots, kept)]
        commit(changes)

    def _arrays(self) -> dict[str, NDArray]:
        return {
            f"{slot}.{name}": array
            for slot, kept in self.state.items()
            for name, array in zip(self.names, kept)
        }


class SGD(_PerParameter):
    """u = momentum u + (1 - momentum) (g + weight_decay p);  p -= lr u.

    >>> w = nn.Parameter([1.0, 2.0])
    >>> (w * w).sum().backward()
    >>> optim.SGD([w], lr=0.25).step()
    >>> print(w)
    [0.5 1. ]
    """

    hyperparameters = ("lr", "momentum", "weight_decay")
    slots = ("u",)

    def __init__(
        self, params: Params, lr: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params)
        self._set(lr=lr, momentum=momentum, weight_decay=weight_decay)

    def _updated(self, i: int, p: Tensor, g: NDArray, t: int, lr: float) -> tuple[NDArray, ...]:
        u = self.momentum * self.state["u"][i] + (1 - self.momentum) * g
        return p.cached_data - lr * u, u


class Adam(_PerParameter):
    """Adam (Kingma and Ba 2015), bias-corrected, with L2 decay in the gradient:

    g += weight_decay p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    >>> w = nn.Parameter([1.0, 2.0])
    >>> (w * w).sum().backward()
    >>> optim.Adam([w], lr=0.5).step()
    >>> print(w)
    [0.5 1.5]
    """

    hyperparameters = ("lr", "beta1", "beta2", "eps", "weight_decay")
    slots = ("m", "v")

    def __init__(
        self,
        params: Params,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        betas: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(params)
        self._set(betas, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)

    def _updated(self, i: int, p: Tensor, g: NDArray, t: int, lr: float) -> tuple[NDArray, ...]:
        m = self.beta1 * self.state["m"][i] + (1 - self.beta1) * g
        v = self.beta2 * self.state["v"][i] + (1 - self.beta2) * (g * g)
        change = (m / (1 - self.beta1**t)) / (_C.sqrt(v / (1 - self.beta2**t)) + self.eps)
        return p.cached_data - lr * change, m, v


class AdamW(Optimizer):
    """Adam with decoupled decay (Loshchilov and Hutter 2019), one fused launch a run of parameters.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    p -= lr ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p).

    Moments are float32. Where the parameters are bfloat16 or float16 a float32 master copy is
    updated and they receive it rounded; it is taken from the parameters at the first step, so load
    weights before that. A list decays every parameter, groups as they say, and a flat object its
    decayed part only: two launches. Data change in place.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = optim.AdamW(nn.flatten_parameters(model), lr=0.01)
    >>> model(ndl.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> optimizer
    AdamW(2 parameters, step 1, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-08, weight_decay=0.01)
    """

    hyperparameters = ("lr", "beta1", "beta2", "eps", "weight_decay")

    def __init__(
        self,
        params: Params,
        lr: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        betas: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(params)
        self._set(betas, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
        if self.flat is not None:
            for name, offset in zip(self.flat.names, self.flat.offsets):
                if offset >= self.flat.decay_size:
                    self._own[name] = {"weight_decay": 0.0}
        # By slot: of a flat object one array, of the part that is updated here, else one a
        # parameter. Made at the first step.
        self._state: dict[str, list[NDArray | None]] = {}
        self._part: slice | None = None if self.flat is None else slice(0, self.flat.size)

    # -- the arrays

    def keep(self, part: slice, arrays: Mapping[str, NDArray] | None = None) -> None:
        """Shard the optimizer: `step` updates flat.data[part] alone from now on, with the state
        `arrays`, by slot, or a copy of that part of the state so far. With a flat object only;
        other ranks keep the other parts of the state, and return them before `state_dict`."""
        assert self.flat is not None and self._part is not None
        if arrays is None and not self._part.start <= part.start <= part.stop <= self._part.stop:
            raise ValueError(f"AdamW.keep: {part} is not within what is kept, {self._part}")
        if arrays is None and self._state:
            at = slice(part.start - self._part.start, part.stop - self._part.start)
            arrays = {slot: array[at].copy() for slot, array in self.kept().items()}
        self._part = part
        if arrays is not None:
            self._state = {slot: [arrays.get(slot)] for slot in ("m", "v", "master")}

    def kept(self) -> dict[str, NDArray]:
        """The state of the part that is updated here, flat, by slot."""
        self._prepare()
        return {slot: one for slot, (one,) in self._state.items() if one is not None}

    def _prepare(self) -> None:
        if self._state:
            return
        data = [p.cached_data for p in self.params]
        if self.flat is not None:
            data = [self.flat.data[self._part]]
        m, v = ([zeros(x.size, "float32", x.device) for x in data] for _ in range(2))
        master = [
            None if x.dtype == "float32" else x.astype("float32").reshape((x.size,)) for x in data
        ]
        self._state = {"m": m, "v": v, "master": master}

    def _arrays(self) -> dict[str, NDArray]:
        self._prepare()
        if self.flat is not None and self._part != slice(0, self.flat.size):
            raise RuntimeError(
                "AdamW: the state of the other ranks' parameters is theirs: save within "
                "DataParallel.whole_optimizer(), and load before DataParallel is made"
            )
        out = {}
        for slot, arrays in self._state.items():
            for i, (name, p) in enumerate(zip(self.names, self.params)):
                array = arrays[0] if self.flat is not None else arrays[i]
                if array is not None:
                    view = array.reshape(p.shape) if self.flat is None else self.flat.view(array, i)
                    out[f"{slot}.{name}"] = view
        return out

    def _next_steps(self) -> dict[str, int]:
        if self.flat is None:
            return super()._next_steps()
        named = zip(self.names, self.params)
        return {name: self._steps[name] + 1 for name, p in named if p.requires_grad}

    def _launches(self, steps: dict[str, int]) -> list[tuple[int, int, int, dict, int]]:
        """(array, start, end, own settings, step): neighbours in the flat buffer that are set alike
        go together; parameters without a step stay."""
        own = [(self._own[name], steps.get(name)) for name in self.names]
        if self.flat is None:
            each = enumerate(zip(self.params, own))
            return [(i, 0, p.size, *settings) for i, (p, settings) in each if settings[1]]
        alike = groupby(zip(self.flat.offsets, own), itemgetter(1))
        runs = [(next(group)[0], settings) for settings, group in alike]
        out: list[tuple[int, int, int, dict, int]] = []
        for (start, settings), (end, _) in zip(runs, [*runs[1:], (self.flat.size, None)]):
            start, end = max(start, self._part.start), min(end, self._part.stop)
            if settings[1] and start < end:
                out.append((0, start, end, *settings))
        return out

    def step(self, scale: NDArray | None = None) -> None:
        """Update every parameter that has a gradient, multiplied by `scale` first.

        scale: the float32 scalar on the device that `grad_norm` returned. When it is not finite the
        step changes nothing but the number of steps.
        """
        self._prepare()
        steps, launches = self._next_steps(), []
        if self.flat is not None:
            grad, data = self.flat.grad, self.flat.data
        for i, start, end, own, t in self._launches(steps):
            if self.flat is None:
                data = self.params[i].cached_data
                grad = self.params[i].grad.cached_data
                if grad.dtype != "float32":
                    grad = grad.astype("float32")
                grad = grad.reshape((data.size,))
                if not data.is_compact():
                    data = self.params[i].cached_data = data.compact()
                data = data.reshape((data.size,))
            part, (m, v, master) = slice(start, end), map(itemgetter(i), self._state.values())
            first = 0 if self._part is None else self._part.start
            kept = slice(start - first, end - first)
            p, p_low = (data[part], None) if master is None else (master[kept], data[part])
            rates = own.get("lr", self.lr), self.beta1, self.beta2, self.eps
            decay = own.get("weight_decay", self.weight_decay)
            launches.append((p, grad[part], m[kept], v[kept], p_low, scale, *rates, decay, t))
        for operands in launches:
            _C.adamw(*operands)
        self.t, self._steps = self.t + 1, self._steps | steps


# ---- schedules -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Schedule:
    """schedule(step) -> learning rate; steps count from 1, and nothing is remembered between calls.

    Over the first `warmup` steps it rises linearly from 0: lr * step / warmup. From there it runs
    to `floor` at step `total`, and stays.
    """

    lr: float
    total: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        warmup, total = self.warmup, self.total
        if warmup < 0 or total < 0 or (total and warmup > total):
            raise ValueError(
                f"{type(self).__name__}: needs 0 <= warmup <= total, but they are {warmup}, {total}"
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * step / self.warmup
        span = max(self.total - self.warmup, 1)
        return self._after_warmup(min((step - self.warmup) / span, 1.0))

    def _after_warmup(self, progress: float) -> float:
        raise NotImplementedError(f"{type(self).__name__}._after_warmup is not defined")


class Constant(Schedule):
    """lr after the warmup."""

    def __init__(self, lr: float, warmup: int = 0) -> None:
        super().__init__(lr, 0, warmup)

    def _after_warmup(self, progress: float) -> float:
        return self.lr


class Linear(Schedule):
    """A straight line from lr to floor."""

    def _after_warmup(self, progress: float) -> float:
        return self.lr + (self.floor - self.lr) * progress


class PythiaCosine(Schedule):
    """The learning rate of GPT-NeoX as it was, with which the published Pythias were trained.

    GPT-NeoX counted `it`, the steps done before: it = step - 1, so that the first step has rate 0
    and the suite's step 1 holds the weights of step 0. After the warmup the rate is
    lr / 2 (cos(pi (it - warmup) / total) + 1), and floor at least. The period is total, not
    total - warmup, and the cosine heads for 0, not for floor: with a floor of lr / 10 and a warmup
    of total / 100 it is flat from it = 0.805 total on (115,139 of 143,000). `Cosine` is the
    schedule as it was meant.
    """

    def __call__(self, step: int) -> float:
        done = max(step - 1, 0)
        if done < self.warmup:
            return self.lr * done / self.warmup
        progress = min((done - self.warmup) / max(self.total, 1), 1.0)
        return max(self.lr / 2 * (math.cos(math.pi * progress) + 1), self.floor)


class Cosine(Schedule):
    """Half a cosine from lr to floor (Loshchilov and Hutter 2017).

    >>> schedule = optim.Cosine(1.0, total=100, warmup=10, floor=0.1)
    >>> [round(schedule(step), 3) for step in (1, 10, 55, 100, 200)]
    [0.1, 1.0, 0.55, 0.1, 0.1]
    """

    def _after_warmup(self, progress: float) -> float:
        return self.floor + (self.lr - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class WSD(Schedule):
    """Warmup, stable, decay (Hu et al. 2024, arXiv 2404.06395): lr after the warmup, and a straight
    line to floor over the last `decay` steps.

    >>> schedule = optim.WSD(1.0, total=100, warmup=10, floor=0.1, decay=20)
    >>> [round(schedule(step), 3) for step in (1, 10, 80, 90, 100, 200)]
    [0.1, 1.0, 1.0, 0.55, 0.1, 0.1]
    """

    def __init__(
        self, lr: float, total: int, warmup: int = 0, floor: float = 0.0, decay: int = 0
    ) -> None:
        super().__init__(lr, total, warmup, floor)
        if not 0 <= decay <= total - warmup:
            raise ValueError(
                f"WSD: needs 0 <= decay <= total - warmup, but they are {decay}, {total}, {warmup}"
            )
        self.stable = total - decay  # the last step before the decay
        self._decay = Linear(lr, decay, floor=floor)

    def __call__(self, step: int) -> float:
        return super().__call__(step) if step <= self.stable else self._decay(step - self.stable)

    def _after_warmup(self, progress: float) -> float:
        return self.lr
