"""needle: Pythia language models from a C core.

    import needle as ndl
    x = ndl.Tensor([[1, 2], [3, 4]], device=ndl.cpu())
    (x @ x).sum().backward()
    x.grad

Importing touches no GPU: the CUDA backend is opened by the first use of `cuda()`.
"""

from __future__ import annotations

import importlib as _importlib
from types import SimpleNamespace as _SimpleNamespace
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from needle import core as _core

_core.find()  # first: it says that a checkout is not built, also where NumPy is missing

import numpy as _np  # before the core, whose settings of OpenBLAS are not NumPy's

_core.load()

from needle import autograd, backend_ndarray, block_mask, init, nn, ops, optim
from needle._C import (
    CudaError,
    CudaFatalError,
    Device,
    Event,
    NDArray,
    all_devices,
    build_info,
    cpu,
    cuda_init,
    cuda_reset,
)
from needle.autograd.grad_mode import enable_grad, is_grad_enabled, set_grad_enabled
from needle.autograd.tensor import Tensor, TensorTuple, is_tensor, no_grad
from needle.backend_ndarray import choose_device as device
from needle.backend_ndarray import cuda, default_device
from needle.block_mask import BlockMask, convert_to_block_mask
from needle.init import (
    arange,
    as_tensor,
    constant,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    manual_seed,
    multinomial,
    one_hot,
    ones,
    ones_like,
    rand,
    rand_like,
    randb,
    randint,
    randn,
    randn_like,
    randperm,
    tensor,
    zeros,
    zeros_like,
)
from needle.ops import *
from needle.ops import instead as _instead
from needle.ops import linalg
from needle.ops.spellings import CASTS as _CASTS

# PyTorch's and NumPy's names: dtypes, which are strings here, constants, constructors.
float32, float16, bfloat16, uint8, uint16, int32, int64 = (
    "float32", "float16", "bfloat16", "uint8", "uint16", "int32", "int64"
)  # fmt: skip
inf, nan, pi, newaxis = _np.inf, _np.nan, _np.pi, None
array, asarray = tensor, as_tensor
set_printoptions = _np.set_printoptions
empty, empty_like, from_numpy = zeros, zeros_like, from_dlpack
inference_mode = no_grad

_instead.explain(Tensor, nn.Module, type(cuda), nn, nn.functional, optim, autograd)

if _TYPE_CHECKING:  # names that __getattr__ finds
    from needle import checkpoint as checkpoint
    from needle import data as data
    from needle import diagnose as diagnose
    from needle import generation as generation
    from needle import hf as hf
    from needle import kernels as kernels
    from needle import models as models
    from needle import sampling as sampling
    from needle import training as training
    from needle.checkpoint import load as load
    from needle.checkpoint import load_checkpoint as load_checkpoint
    from needle.checkpoint import save as save
    from needle.checkpoint import save_checkpoint as save_checkpoint
    from needle.data import dataset as dataset
    from needle.diagnose import show_config as show_config
    from needle.interp import activations as activations
    from needle.interp import hooks as hooks
    from needle.interp import patching as patching
    from needle.models.pythia import Pythia as Pythia
    from needle.models.pythia import PythiaConfig as PythiaConfig
    from needle.models.pythia import create_pythia_70m as create_pythia_70m
    from needle.training import evaluate as evaluate
    from needle.training import fit as fit
    from needle.training import open_run as open_run

__all__ = [
    "CudaError", "CudaFatalError", "Device", "Event", "NDArray", "Tensor", "TensorTuple",
    "all_devices", "arange", "array", "as_tensor", "asarray", "autograd", "backend_ndarray",
    "bfloat16", "block_mask", "build_info", "constant", "cpu", "cuda", "cuda_init", "cuda_reset",
    "default_device", "device", "empty", "empty_like", "enable_grad", "eye", "float16", "float32",
    "from_dlpack", "from_numpy", "full", "full_like", "inf", "inference_mode", "init", "int32",
    "int64", "is_grad_enabled", "is_tensor", "linalg", "linspace", "manual_seed", "multinomial",
    "nan", "newaxis", "nn", "no_grad", "one_hot", "ones", "ones_like", "ops", "optim", "pi", "rand",
    "rand_like", "randb", "randint", "randn", "randn_like", "randperm", "set_grad_enabled",
    "set_printoptions", "tensor", "uint16", "uint8", "zeros", "zeros_like",
]  # fmt: skip
__all__ += ops.__all__

__version__: str = build_info()["version"]

# A module that costs time to import, or that few need, comes when it is first asked for.
_SUBMODULES = {
    "activations": "interp.activations",
    "checkpoint": "checkpoint",
    "data": "data",
    "diagnose": "diagnose",
    "evaluate": "training.evaluate",
    "generation": "generation",
    "hf": "hf",
    "hooks": "interp.hooks",
    "kernels": "kernels",
    "models": "models",
    "patching": "interp.patching",
    "sampling": "sampling",
    "training": "training",
}
_LAZY = {
    "create_pythia_70m": "models.pythia",
    "Pythia": "models.pythia",
    "PythiaConfig": "models.pythia",
    "fit": "training",
    "open_run": "training",
    "load": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save": "checkpoint",
    "save_checkpoint": "checkpoint",
    "show_config": "diagnose",
    "dataset": "data",
}


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        try:
            return _importlib.import_module(f"needle.{_SUBMODULES[name]}")
        except ModuleNotFoundError as error:
            if error.name != f"needle.{_SUBMODULES[name]}":
                raise
    elif name in _CASTS:  # Python's names: no name of this module, which `import *` would give
        return _CASTS[name]
    elif name in _LAZY:
        return getattr(_importlib.import_module(f"needle.{_LAZY[name]}"), name)
    elif name == "utils":  # torch.utils.data
        return _SimpleNamespace(data=_importlib.import_module("needle.data"))
    return _instead.missing("needle", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_LAZY})
