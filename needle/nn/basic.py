"""The layers of the course: linear, activations, norms, dropout, containers, embedding, the
loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from needle import init, ops
from needle._C import Device
from needle.autograd import Tensor
from needle.backend_ndarray import listed
from needle.nn.module import Module, Parameter
from needle.ops.reduce import rounded

__all__ = [
    "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d", "Dropout", "ELU", "Embedding", "Flatten", "GELU",
    "Identity", "KLDivLoss", "L1Loss", "LayerNorm1d", "LeakyReLU", "Linear", "LogSoftmax",
    "MSELoss", "ModuleDict", "ModuleList", "RMSNorm", "ReLU", "Residual", "Sequential", "SiLU",
    "Sigmoid", "Softmax", "SoftmaxLoss", "Softplus", "SwiGLU", "Tanh", "TiedHead",
]  # fmt: skip


def check_features(module: Module, x: Any, name: str) -> None:
    """ValueError where the last axis of x is not as long as the module's attribute `name` says."""
    size = getattr(module, name)
    if isinstance(x, Tensor) and x.cached_data.shape[-1:] != listed(size):
        got = f"{x.shape[-1]}: the last axis of x {x.shape}" if x.shape else "x without axes"
        raise ValueError(f"{type(module).__name__}: {name} is {size}, got {got}")


class Identity(Module):
    """x."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Linear(Module):
    """x @ weight + bias over the last axis of x.

    weight (in, out), Kaiming uniform with fan_in `in_features`, drawn first; bias (1, out), Kaiming
    uniform with fan_in `out_features`. With `std`: weight N(0, std^2), and bias zeros (out,).

    >>> layer = nn.Linear(3, 2)
    >>> layer(ndl.ones(5, 3)).shape
    (5, 2)
    >>> layer
    Linear(in_features=3, out_features=2, weight (3, 2), bias (1, 2)): 8 parameters
    """

    fuses = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device | str | None = None,
        dtype: str = "float32",
        std: float | None = None,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        if min(in_features, out_features) < 1:
            raise ValueError(f"Linear: sizes must be above 0, not {in_features}, {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Parameter(
            init.kaiming_uniform(in_features, out_features, **place)
            if std is None
            else init.randn(in_features, out_features, std=std, **place)
        )
        self.bias: Parameter | None = None
        if bias:
            self.bias = Parameter(
                init.kaiming_uniform(out_features, 1, **place).reshape((1, out_features))
                if std is None
                else init.zeros(out_features, **place)
            )

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """residual, of the result's shape, is added."""
        check_features(self, x, "in_features")
        return ops.linear(x, self.weight, self.bias, residual)


class TiedHead(Module):
    """x @ weight^T with the weight (V, C) of an embedding: no parameter of its own."""

    fuses = True

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    @property
    def weight(self) -> Parameter:
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        check_features(self.embedding, x, "embedding_dim")
        return ops.linear_transposed(x, self.weight)


class Flatten(Module):
    """(B, ...) -> (B, the rest).

    >>> nn.Flatten()(ndl.ones(2, 3, 4)).shape
    (2, 12)
    """

    def forward(self, x: Tensor) -> Tensor:
        return ops.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


class _Function(Module):
    """A function of needle.ops, which the class statement names; also its options, which follow the
    operands, with their defaults: attributes of the module."""

    function: Callable[..., Tensor]
    options: Mapping[str, Any] = {}

    def __init_subclass__(cls, function: Any = None, **options: Any) -> None:
        if function is None:  # of a user's class, which may have other bases
            return super().__init_subclass__(**options)
        super().__init_subclass__()
        cls.function, cls.options = staticmethod(function), options

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()
        if len(given) > len(self.options) or not named.keys() <= self.options.keys():
            raise TypeError(f"{type(self).__name__}: takes {[*self.options]}, not {given, named}")
        vars(self).update({**self.options, **dict(zip(self.options, given)), **named})

    def forward(self, *operands: Any) -> Tensor:
        return type(self).function(*operands, *(getattr(self, name) for name in self.options))


class ReLU(_Function, function=ops.relu):
    """max(x, 0)."""


class LeakyReLU(_Function, function=ops.leaky_relu, negative_slope=0.01):
    """ops.leaky_relu: x above 0, negative_slope x elsewhere."""


class ELU(_Function, function=ops.elu, alpha=1.0):
    """ops.elu: x above 0, alpha (e^x - 1) elsewhere."""


class GELU(_Function, function=ops.gelu, approximate="none"):
    """x Phi(x); approximate: "none" for the error function, "tanh" for its approximation."""


class SiLU(_Function, function=ops.silu):
    """x sigmoid(x)."""


class Tanh(_Function, function=ops.tanh):
    """The hyperbolic tangent."""


class Softmax(_Function, function=ops.softmax, dim=-1):
    """ops.softmax over the axis `dim`."""


class LogSoftmax(_Function, function=ops.logsoftmax, dim=-1):
    """ops.logsoftmax over the axis `dim`."""


class Softplus(_Function, function=ops.softplus):
    """log(1 + e^x)."""


class Sigmoid(_Function, function=ops.sigmoid):
    """1 / (1 + e^-x)."""


class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020): (..., dim) -> (..., dim), three Linear without
    bias, gate and up (dim, hidden), drawn first, and down (hidden, dim)."""

    def __init__(
        self, dim: int, hidden: int, device: Device | str | None = None, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias=False, device=device, dtype=dtype)
        self.up = Linear(dim, hidden, bias=False, device=device, dtype=dtype)
        self.down = Linear(hidden, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ops.silu(self.gate(x)) * self.up(x))


class ModuleList(Module, list):
    """A list of modules, or of parameters, that is a module."""

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    def __init__(self, modules: Iterable[Any] = ()) -> None:
        Module.__init__(self)
        list.__init__(self, modules)


class ModuleDict(Module, dict):
    """A dict of modules that is a module; its keys are attributes, too.

    >>> heads = nn.ModuleDict({"a": nn.Linear(2, 3)})
    >>> heads.a is heads["a"], [name for name, _ in heads.named_parameters()]
    (True, ['a.weight', 'a.bias'])
    """

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__

    def __init__(self, *modules: Any, **named: Any) -> None:
        Module.__init__(self)
        dict.__init__(self, *modules, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"ModuleDict: no module {name!r}; it has {[*self]}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            self[name] = value
        else:
            super().__setattr__(name, value)


class _Stages(tuple):
    """The course's `Sequential.modules`; called, as PyTorch has it, the module and all below."""

    owner: Module

    def __call__(self) -> list[Module]:
        return Module.modules(self.owner)


class Sequential(ModuleList):
    """One module after the other: a list of them, `model[0]`, `model[:-1]`, `len(model)`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> model(ndl.ones(1, 4)).shape
    (1, 2)
    >>> model
    Sequential(): 58 parameters
      0: Linear(in_features=4, out_features=8, weight (4, 8), bias (1, 8))
      1: ReLU()
      2: Linear(in_features=8, out_features=2, weight (8, 2), bias (1, 2))
    """

    def __init__(self, *modules: Module) -> None:
        for i, module in enumerate(modules):
            if not callable(module) or isinstance(module, type):
                raise TypeError(
                    f"Sequential: part {i} must be a module, but is {type(module).__name__} (of a "
                    "dict: Sequential(*parts.values()))"
                )
        super().__init__(modules)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Sequential(*found) if isinstance(index, slice) else found

    @property
    def modules(self) -> _Stages:  # type: ignore[override]
        """The modules as a tuple, also of the course; `modules()` is PyTorch's."""
        stages = _Stages(self)
        stages.owner = self
        return stages

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


class Residual(Module):
    """x + fn(x).

    >>> print(nn.Residual(nn.ReLU())(ndl.Tensor([-1, 1])))
    [-1.  2.]
    """

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class Dropout(Module):
    """Zeroes each element with probability p in training and scales the others by 1 / (1 - p); in
    evaluation, and for p = 0, does nothing and draws nothing.

    >>> np.random.seed(0)
    >>> drop = nn.Dropout(0.5)
    >>> print(drop(ndl.ones(6)))
    [0. 0. 0. 0. 2. 0.]
    >>> print(drop.eval()(ndl.ones(6)))
    [1. 1. 1. 1. 1. 1.]
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if isinstance(p, str) or not 0 <= p < 1:
            raise ValueError(f"Dropout: p must be in [0, 1), but is {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.p, self.training)


class LayerNorm1d(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; weight 1 and bias 0,
    (dim,). Hooks on `hook_scale` or `hook_normalized` make it compute step by step in float32.

    >>> print(nn.LayerNorm1d(3)(ndl.Tensor([[1, 2, 3]])).numpy().round(3))
    [[-1.225  0.     1.225]]
    """

    fuses = True
    hook_points = {"hook_scale": None, "hook_normalized": None, "hook_out": None}

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        device: Device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = Parameter(init.ones(dim, device=device, dtype=dtype))
        self.bias = Parameter(init.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_features(self, x, "dim")
        if not self.is_hooked_at("hook_scale", "hook_normalized"):
            return self.hook("hook_out", ops.layer_norm(x, self.weight, self.bias, self.eps))
        wide = ops.astype(x, "float32")
        centred = wide - ops.mean(wide, -1, True)
        variance = ops.mean(centred * centred, -1, True)
        scale = self.hook("hook_scale", ops.sqrt(variance + self.eps))
        normalized = self.hook("hook_normalized", centred / scale)
        weight, bias = (ops.astype(p, "float32") for p in (self.weight, self.bias))
        return self.hook("hook_out", ops.astype(normalized * weight + bias, x.dtype))


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019), computed in
    float32; weight 1, (dim,).

    >>> print(nn.RMSNorm(2)(ndl.Tensor([[3, 4]])).numpy().round(3))
    [[0.849 1.131]]
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        device: Device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = Parameter(init.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_features(self, x, "dim")
        wide = ops.astype(x, "float32")
        scale = ops.rsqrt(ops.mean(wide * wide, -1, True) + self.eps)
        return rounded(wide * scale * self.weight, x)


class BatchNorm1d(Module):
    """Normalises each feature of (B, dim) over the batch in training, and by running statistics,
    `running = (1 - momentum) running + momentum batch`, in evaluation (Ioffe and Szegedy 2015).
    Variances are biased.

    >>> norm = nn.BatchNorm1d(1)
    >>> print(norm(ndl.Tensor([[1], [3]])).numpy().round(3))
    [[-1.]
     [ 1.]]
    >>> print(norm.running_mean)
    [0.2]
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: Device | str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.momentum = momentum
        self.weight = Parameter(init.ones(dim, device=device, dtype=dtype))
        self.bias = Parameter(init.zeros(dim, device=device, dtype=dtype))
        self.running_mean = init.zeros(dim, device=device, dtype=dtype)
        self.running_var = init.ones(dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        check_features(self, x, "dim")
        if x.ndim != 2:
            raise ValueError(f"BatchNorm1d: x must be (B, {self.dim}), but its shape is {x.shape}")
        wide = ops.astype(x, "float32")
        if self.training:
            mean = ops.mean(wide, 0)
            off = wide - mean
            var = ops.mean(off * off, 0)
            for running, batch in ((self.running_mean, mean), (self.running_var, var)):
                kept = running.cached_data
                kept[...] = (1 - self.momentum) * kept + self.momentum * batch.cached_data
        else:
            off, var = wide - self.running_mean, ops.astype(self.running_var, "float32")
        return rounded(self.weight * (off / ops.sqrt(var + self.eps)) + self.bias, x)


class Embedding(Module):
    """Rows of weight (n, d), drawn from N(0, std^2), at whole numbers of any shape: (...) -> (...,
    d).

    >>> nn.Embedding(10, 4)([[1, 2, 3]]).shape
    (1, 3, 4)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: Device | str | None = None,
        dtype: str = "float32",
        std: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = Parameter(
            init.randn(num_embeddings, embedding_dim, std=std, device=device, dtype=dtype)
        )

    def forward(self, x: Any) -> Tensor:
        return ops.embedding(x, self.weight)


class SoftmaxLoss(_Function, function=ops.cross_entropy, reduction="mean", ignore_index=-100):
    """ops.cross_entropy: by default the mean over logits (B, classes) for classes y (B,), a float32
    scalar.

    >>> loss = nn.SoftmaxLoss()(ndl.zeros(5, 10), [0, 1, 2, 3, 4])
    >>> round(loss.item(), 4)  # log 10
    2.3026
    """


class MSELoss(_Function, function=ops.mse_loss, reduction="mean"):
    """ops.mse_loss: (input - target)^2; reduction: "mean", "sum" or "none"."""


class L1Loss(_Function, function=ops.l1_loss, reduction="mean"):
    """ops.l1_loss: |input - target|."""


class BCELoss(_Function, function=ops.binary_cross_entropy, reduction="mean"):
    """ops.binary_cross_entropy of probabilities."""


class BCEWithLogitsLoss(_Function, function=ops.binary_cross_entropy_with_logits, reduction="mean"):
    """ops.binary_cross_entropy_with_logits."""


class KLDivLoss(_Function, function=ops.kl_div, reduction="mean"):
    """ops.kl_div of log-probabilities and probabilities; reduction may be "batchmean"."""
