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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from needle import _C, ops
from needle._C import NDArray
from needle.autograd import Tensor
from needle.backend_ndarray import commit, zeros
from needle.nn import FlatParameters
from needle.nn.module import check_arrays
from needle.nn.utils import clip_grad_norm, grad_norm  # noqa: F401  names of this file too

OWN = ("lr", "weight_decay")  # what a group of parameters may have of its own
Params = Any  # Iterable[Parameter] | Iterable[tuple[str, Parameter]] | list[dict] | FlatParameters
Kept = dict[str, NDArray]  # by slot, the float32 arrays of a parameter


def _check(owner: str, name: str, value: Any) -> None:
    """Raise ValueError for a hyperparameter with which no step makes sense."""
    below_one = name in ("momentum", "beta1", "beta2")
    if not 0 <= value < (1 if below_one else math.inf):
        kind = "in [0, 1)" if below_one else "finite and not negative"
        raise ValueError(f"{owner}: {name} must be {kind}, but is {value!r:.40}")


@dataclass(eq=False)
class _Trained:
    """A parameter in an optimizer."""

    name: Any
    p: Tensor
    group: int  # the number of the group that it was given in
    own: dict[str, Any]  # the settings of that group
    steps: int = 0  # those in which it had a gradient
    kept: Kept = field(default_factory=dict)  # made when it is first needed


class Optimizer:
    """The parameters, their names, and state that is saved by name: the base of all optimizers.

    `step()` walks the parameters one by one, in float32 array arithmetic. It is atomic: whatever
    needs memory, the new values and state beside the old ones, is made before the first change.

    Names are those of the pairs or of the flat object, else the ones that the module's
    `parameters()` gave, else ordinals "0", "1", ... A list takes a state with ordinals by place.
    """

    hyperparameters: tuple[str, ...] = ("lr",)
    slots: tuple[str, ...] = ()  # names of the float32 arrays kept for each parameter

    lr: float
    weight_decay: float

    def __init__(self, params: Params) -> None:
        kind = type(self).__name__
        if isinstance(params, Tensor):
            raise TypeError(f"{kind}: params must be a list, not a {type(params).__name__}")
        self.flat: FlatParameters | None = None
        if isinstance(params, FlatParameters):
            self.flat, params = params, zip(params.names, params.parameters)
        self.t = 0  # steps done
        self.trained = [*self._found(params)]
        if not self.trained:
            raise ValueError(f"{kind}: there are no parameters")
        names = [x.name for x in self.trained]
        if None in names or len(set(names)) != len(names):
            names = [*range(len(names))]
        for x, name in zip(self.trained, names):
            x.name = str(name)
        self.names, self.params = [x.name for x in self.trained], [x.p for x in self.trained]
        if len({id(p) for p in self.params}) != len(self.params):
            raise ValueError(f"{kind}: a parameter is given twice")

    def _found(self, params: Any) -> Iterator[_Trained]:
        kind = type(self).__name__
        for number, item in enumerate(params):
            group = item if isinstance(item, dict) else {"params": [item]}
            own = {k: v for k, v in group.items() if k != "params"}
            if "params" not in group or not own.keys() <= {*OWN}:
                raise ValueError(
                    f"{kind}: a group has 'params' and may have 'lr' and 'weight_decay', "
                    f"but this one has {sorted(group)}"
                )
            members = group["params"]
            for member in [members] if isinstance(members, Tensor) else members:
                name, p = member if isinstance(member, tuple) else (None, member)
                if not isinstance(p, Tensor):
                    raise TypeError(f"{kind}: params must hold Parameters, not {type(p).__name__}")
                if p.op is not None:
                    raise ValueError(
                        f"{kind}: params must hold Parameters, not the result of "
                        f"{type(p.op).__name__}, which would not be trained"
                    )
                name = name or getattr(p, "name", None)
                yield _Trained(name, p, number if group is item else 0, own)

    def __post_init__(self, params: Params, betas: tuple[float, float] | None = None) -> None:
        """Take the parameters, and `betas` in the place of beta1 and beta2. ValueError where a
        hyperparameter, or one of a group's own, is one with which no step makes sense."""
        Optimizer.__init__(self, params)
        if betas is not None:
            vars(self).update(zip(("beta1", "beta2"), betas))
        for group in (self.settings(), *(x.own for x in self.trained)):
            for name, value in group.items():
                _check(type(self).__name__, name, value)

    def settings(self) -> dict[str, Any]:
        """The hyperparameters by name."""
        return {name: getattr(self, name) for name in self.hyperparameters}

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self._prepare()
        changes: list[tuple[Any, Any, Any]] = [(vars(self), "t", self.t + 1)]
        for x in self.trained:
            p, grad = x.p.cached_data, x.p.grad
            if grad is None:
                continue
            g = grad.cached_data.astype("float32")
            decay = x.own.get("weight_decay", self.weight_decay)
            if decay:
                g = g + decay * p.astype("float32")
            new, kept = self._updated(x, g, x.own.get("lr", self.lr))
            changes.append((p, ..., new.astype(p.dtype)))
            changes += [(vars(x), "steps", x.steps + 1), (vars(x), "kept", kept)]
        commit(changes)

    def _updated(self, x: _Trained, g: NDArray, lr: float) -> tuple[NDArray, Kept]:
        """The values of a parameter after its next step, and what is kept of it then, given its
        gradient in float32."""
        raise NotImplementedError(f"{type(self).__name__}._updated is not defined")

    def reset_grad(self) -> None:
        """Drop the gradients: those of a flat object count as zeros, each other `.grad` is None."""
        for x in self.params if self.flat is None else [self.flat]:
            x.reset_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """PyTorch's name of reset_grad, which takes no account of `set_to_none`."""
        self.reset_grad()

    @property
    def param_groups(self) -> list[ParamGroup]:
        """PyTorch's groups: those given, and of a group the parameters with the same settings.
        `group["lr"] = 0.1` sets the rate of these alone in the optimizer."""
        alike: dict[Any, list[_Trained]] = {}
        for x in self.trained:
            alike.setdefault((x.group, *sorted(x.own.items())), []).append(x)
        return [ParamGroup(self, members) for members in alike.values()]

    # -- state

    def _prepare(self) -> None:
        """Make the state that is not there yet."""
        for x in self.trained:
            x.kept = x.kept or self._new(x.p.cached_data)

    def _new(self, data: NDArray) -> Kept:
        """What is kept of a parameter before its first step."""
        return {slot: zeros(data.shape, "float32", data.device) for slot in self.slots}

    def _arrays(self) -> dict[str, NDArray]:
        """The kept arrays under "<slot>.<parameter>", in the parameters' shapes."""
        self._prepare()
        return {
            f"{slot}.{x.name}": x.kept[slot].reshape(x.p.shape)
            for slot in self.slots
            for x in self.trained
            if slot in x.kept
        }

    def state_dict(self) -> dict[str, Any]:
        """{"step": steps done, "arrays": {name: NDArray}, the hyperparameters, "groups": the
        settings of parameters that have their own, and "steps": those of parameters that had no
        gradient in some}. The arrays are the optimizer's own memory; apart from them everything is
        plain numbers and strings."""
        state = {"step": self.t, "arrays": self._arrays(), **self.settings()}
        state["groups"] = {x.name: dict(x.own) for x in self.trained if x.own}
        state["steps"] = {x.name: x.steps for x in self.trained if x.steps != self.t}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, from any device. ValueError lists all that does not fit
        before anything is loaded."""
        commit(self.load_changes(state))

    def load_changes(self, state: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
        """Return the changes of load_state_dict, for `backend_ndarray.commit`."""
        op, own = f"{type(self).__name__}.load_state_dict", self._arrays()
        for name in ("arrays", "step", *self.hyperparameters):
            if name not in state:
                raise ValueError(f"{op}: {name} is missing")
        state = renamed(state, self._names_in(state))
        arrays, groups = state["arrays"], state.get("groups")
        check_arrays(op, own, arrays)
        changes: list[tuple[Any, Any, Any]] = [
            (array, ..., arrays[name].to(array.device)) for name, array in own.items()
        ]
        changes += [(vars(self), name, state[name]) for name in self.hyperparameters]
        changes.append((vars(self), "t", int(state["step"])))
        for x in self.trained:
            steps = state.get("steps", {}).get(x.name, int(state["step"]))
            changes.append((vars(x), "steps", steps))
            if groups is not None:
                changes.append((vars(x), "own", dict(groups.get(x.name, {}))))
        return changes

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
        values = ", ".join(f"{name}={value}" for name, value in self.settings().items())
        return f"{type(self).__name__}({len(self.params)} parameters, step {self.t}, {values})"


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of an optimizer with its parameters under other names, where there are
    such."""

    def key(text: str) -> str:
        slot, _, name = text.partition(".")
        return f"{slot}.{names.get(name, name)}"

    changed = {**state, "arrays": {key(name): array for name, array in state["arrays"].items()}}
    for part in {"groups", "steps"} & state.keys():
        changed[part] = {names.get(name, name): of for name, of in state[part].items()}
    return changed


class ParamGroup(UserDict):
    """An entry of `param_groups`: "params" and the hyperparameters, which can be set. KeyError for
    another name, ValueError for a value with which no step makes sense."""

    def __init__(self, optimizer: Optimizer, members: list[_Trained]) -> None:
        self.optimizer, self.members = optimizer, members
        settings = {**optimizer.settings(), **members[0].own}
        self.data = {"params": [x.p for x in members], **settings}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.data or name == "params":
            raise KeyError(f"param_groups: {name!r} is none of {[*self.data][1:]}")
        _check("param_groups", name, value)
        self.data[name] = value
        shared = vars(self.optimizer)
        if name in OWN and not self.members[0].own:  # the others keep what they had of it
            for x in self.optimizer.trained:
                if x not in self.members:
                    x.own.setdefault(name, shared[name])
        for x in self.members:
            (x.own if x.own and name in OWN else shared)[name] = value


@dataclass(eq=False, repr=False)
class SGD(Optimizer):
    """u = momentum u + (1 - momentum) (g + weight_decay p);  p -= lr u.

    >>> w = nn.Parameter([1.0, 2.0])
    >>> (w * w).sum().backward()
    >>> optim.SGD([w], lr=0.25).step()
    >>> print(w)
    [0.5 1. ]
    """

    params: InitVar[Params]
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    hyperparameters = ("lr", "momentum", "weight_decay")
    slots = ("u",)

    def _updated(self, x: _Trained, g: NDArray, lr: float) -> tuple[NDArray, Kept]:
        u = self.momentum * x.kept["u"] + (1 - self.momentum) * g
        return x.p.cached_data - lr * u, {"u": u}


@dataclass(eq=False, repr=False)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), bias-corrected, with L2 decay in the gradient:

    g += weight_decay p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    >>> w = nn.Parameter([1.0, 2.0])
    >>> (w * w).sum().backward()
    >>> optim.Adam([w], lr=0.5).step()
    >>> print(w)
    [0.5 1.5]
    """

    params: InitVar[Params]
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    betas: InitVar[tuple[float, float] | None] = None

    hyperparameters = ("lr", "beta1", "beta2", "eps", "weight_decay")
    slots = ("m", "v")

    def _updated(self, x: _Trained, g: NDArray, lr: float) -> tuple[NDArray, Kept]:
        t = x.steps + 1
        m = self.beta1 * x.kept["m"] + (1 - self.beta1) * g
        v = self.beta2 * x.kept["v"] + (1 - self.beta2) * (g * g)
        change = (m / (1 - self.beta1**t)) / (_C.sqrt(v / (1 - self.beta2**t)) + self.eps)
        return x.p.cached_data - lr * change, {"m": m, "v": v}


@dataclass(eq=False, repr=False)
class AdamW(Adam):
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

    lr: float = 0.001
    weight_decay: float = 0.01

    slots = ("m", "v", "master")

    def __post_init__(self, params: Params, betas: tuple[float, float] | None = None) -> None:
        super().__post_init__(params, betas)
        if self.flat is not None:
            self._parts = [slice(0, self.flat.size)]  # of the flat buffer: what is updated here ...
            self._kept: Kept = {}  # ... and what is kept of them, one after the other
            for x, offset in zip(self.trained, self.flat.offsets):
                if offset >= self.flat.decay_size:
                    x.own["weight_decay"] = 0.0

    # -- the arrays

    def keep(self, parts: Sequence[slice], arrays: Mapping[str, NDArray] | None = None) -> None:
        """Shard the optimizer: `step` updates these parts of flat.data alone from now on, which
        ascend, with the state `arrays`, by slot, or a copy of that part of the whole state so far.
        With a flat object only; other ranks keep the other parts of the state, and return them
        before `state_dict`."""
        if arrays is None:
            if [*parts] == self._parts:
                return
            if not self._is_whole:
                raise ValueError(f"AdamW.keep: {parts} of a state that is kept in parts already")
            arrays = {slot: _joined(array, parts) for slot, array in self._kept.items()}
        self._parts, self._kept = [*parts], dict(arrays)

    @property
    def _is_whole(self) -> bool:
        return self._parts == [slice(0, self.flat.size)]

    def kept(self) -> dict[str, NDArray]:
        """The state of the parts that are updated here, one after the other, flat, by slot."""
        self._prepare()
        return self._kept

    def _prepare(self) -> None:
        if self.flat is None:
            super()._prepare()
        else:
            self._kept = self._kept or self._new(_joined(self.flat.data, self._parts))

    def _new(self, data: NDArray) -> Kept:
        flat = (data.size,)
        kept = {slot: zeros(flat, "float32", data.device) for slot in "mv"}
        if data.dtype != "float32":
            kept["master"] = data.astype("float32").reshape(flat)
        return kept

    def _arrays(self) -> dict[str, NDArray]:
        if self.flat is None:
            return super()._arrays()
        if not self._is_whole:
            raise RuntimeError(
                "AdamW: the state of the other ranks' parameters is theirs: save within "
                "DataParallel.whole_optimizer(), and load before DataParallel is made"
            )
        kept, named = self.kept().items(), [*enumerate(self.names)]
        return {f"{slot}.{name}": self.flat.view(x, i) for slot, x in kept for i, name in named}

    def _runs(self) -> list[tuple]:
        """Of each run of neighbours in a part that are set alike: data, gradient, what is kept and
        where in that, settings, and the number of the step. Others than those due stay."""
        runs, place = [], 0
        data, grad = self.flat.data, self.flat.grad
        alike = [(x.own, x.p.requires_grad and x.steps + 1) for x in self.trained]
        heads = groupby(zip(self.flat.offsets, alike), itemgetter(1))
        starts = [(next(group)[0], *settings) for settings, group in heads]
        ends = [*starts[1:], (self.flat.size,)]
        for part in self._parts:
            for (first, own, t), (end, *_) in zip(starts, ends):
                start, end = max(first, part.start), min(end, part.stop)
                if t and start < end:
                    at = slice(place + start - part.start, place + end - part.start)
                    runs.append((data[start:end], grad[start:end], self._kept, at, own, t))
            place += part.stop - part.start
        return runs

    def _run_of(self, x: _Trained) -> tuple:
        """The same of one parameter."""
        data, grad = x.p.cached_data, x.p.grad.cached_data
        if grad.dtype != "float32":
            grad = grad.astype("float32")
        if not data.is_compact():
            data = x.p.cached_data = data.compact()
        size = (data.size,)
        return data.reshape(size), grad.reshape(size), x.kept, slice(None), x.own, x.steps + 1

    def step(self, scale: NDArray | None = None) -> None:
        """Update every parameter that has a gradient, multiplied by `scale` first.

        scale: the float32 scalar on the device that `grad_norm` returned. When it is not finite the
        step changes nothing but the number of steps.
        """
        self._prepare()
        if self.flat is None:
            due = [x for x in self.trained if x.p.grad is not None]
            runs = [self._run_of(x) for x in due]
        else:
            due, runs = [x for x in self.trained if x.p.requires_grad], self._runs()
        for data, grad, kept, at, own, t in runs:
            p, p_low = (kept["master"][at], data) if "master" in kept else (data, None)
            rates = own.get("lr", self.lr), self.beta1, self.beta2, self.eps
            decay = own.get("weight_decay", self.weight_decay)
            _C.adamw(p, grad, kept["m"][at], kept["v"][at], p_low, scale, *rates, decay, t)
        for x in due:
            x.steps += 1
        self.t += 1


def _joined(array: NDArray, parts: Sequence[slice]) -> NDArray:
    """Return a copy of parts of an array (N,), one after the other."""
    return ops.concatenate([Tensor.from_ndarray(array[part]) for part in parts]).cached_data


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
