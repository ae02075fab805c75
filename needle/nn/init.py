"""PyTorch's torch.nn.init: initialisers that fill a Tensor in place and return it.

Weights of nn.Linear are (in, out): their fan_in is the size of the first axis, in PyTorch, whose
weights are (out, in), that of the second. needle.init makes new Tensors.
"""

from __future__ import annotations

import math

from needle import init
from needle.autograd import Tensor, no_grad


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    with no_grad():
        return tensor.fill_(values)


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Fill with `val`."""
    return _filled(tensor, init.full_like(tensor, val))


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with 0."""
    return constant_(tensor, 0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with 1."""
    return constant_(tensor, 1)


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Draw uniformly from [a, b), by NumPy's generator (ndl.manual_seed).

    >>> bool((nn.init.uniform_(nn.Parameter(np.zeros((2, 3))), -2, -1) < 0).all())
    True
    """
    return _filled(tensor, init.rand(*tensor.shape, low=a, high=b, device=tensor.device))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Draw from the normal distribution, by NumPy's generator (ndl.manual_seed)."""
    return _filled(tensor, init.randn(*tensor.shape, mean=mean, std=std, device=tensor.device))


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor of the standard deviation of weights whose result goes through a function:
    "linear", "sigmoid", "tanh", "relu", "leaky_relu" or "selu". param: the slope of leaky_relu,
    0.01 by default. ValueError for another function."""
    slope = 0.01 if param is None else param
    gains = {"leaky_relu": math.sqrt(2 / (1 + slope**2)), "relu": math.sqrt(2), "tanh": 5 / 3}
    gains |= {"linear": 1.0, "sigmoid": 1.0, "selu": 0.75}
    if nonlinearity not in gains:
        raise ValueError(f"nn.init: nonlinearity must be one of {[*gains]}, not {nonlinearity!r}")
    return gains[nonlinearity]


def _fans(tensor: Tensor) -> tuple[int, int]:
    if tensor.ndim != 2:
        raise ValueError(
            f"nn.init: needs a matrix (fan_in, fan_out), but the shape is {tensor.shape}"
        )
    return tensor.shape[0], tensor.shape[1]


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Draw uniformly from +-gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010). tensor:
    (fan_in, fan_out); ValueError for another number of axes."""
    return _filled(tensor, init.xavier_uniform(*_fans(tensor), gain, device=tensor.device))


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Draw from the normal distribution of std gain sqrt(2 / (fan_in + fan_out)). tensor: (fan_in,
    fan_out); ValueError for another number of axes."""
    return _filled(tensor, init.xavier_normal(*_fans(tensor), gain, device=tensor.device))


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"nn.init: mode must be 'fan_in' or 'fan_out', not {mode!r}")
    return calculate_gain(nonlinearity, a) / math.sqrt(_fans(tensor)[mode == "fan_out"])


def kaiming_uniform_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Draw uniformly from +-gain sqrt(3 / fan) (He et al. 2015). tensor: (fan_in, fan_out); a: the
    slope of leaky_relu; mode: "fan_in" or "fan_out"; nonlinearity: as calculate_gain takes it.
    ValueError for other ones."""
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Draw from the normal distribution of std gain / sqrt(fan), with the arguments of
    kaiming_uniform_."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity))
