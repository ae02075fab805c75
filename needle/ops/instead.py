"""PyTorch's names that needle does not have, and what to write instead: the AttributeError says it.
`INSTEAD` is the one table; docs/operations.md shows it."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any, NoReturn

INSTEAD = {
    "compile jit": "leave it out: needle's ops are compiled already",
    "backends use_deterministic_algorithms": "leave it out: results are deterministic",
    "set_default_dtype set_default_device": "write dtype= and device= where a Tensor is made",
    "amp autocast GradScaler": 'write model.to("bfloat16"), which needs no scaler',
    "double float64": "write float32, the widest dtype of floats",
    "Generator manual_seed_all": "write ndl.manual_seed(seed), for all devices",
    "synchronize empty_cache": "it is a method of ndl.cuda()",
    "memory_allocated max_memory_allocated": "write ndl.cuda().memory_stats()",
    "parallel DataParallel": "train by `needle train --gpus N`, docs/many_gpus.md",
    "register_forward_hook register_forward_pre_hook": "write model.hooks({name: function}) of a "
    "language model, or call the function in a forward",
    "register_hook retain_grad register_full_backward_hook": "write ndl.autograd.grad(loss, x), "
    "which gives the gradient of any Tensor",
    "register_parameter add_module": "write setattr(self, name, value)",
    "Function": "write a subclass of ndl.autograd.TensorOp, docs/extending.md",
    "Variable": "write ndl.Tensor(array)",
    "lr_scheduler": "write schedule = optim.Cosine(lr, total=steps), and optimizer.lr = "
    "schedule(step) before each step",
    "RMSprop Adagrad": "write optim.Adam",
    "NLLLoss": "write nn.functional.nll_loss",
    "MultiheadAttention": "write nn.AttentionLayer, or nn.Attention for causal self-attention",
    "TransformerEncoderLayer": "write nn.TransformerLayer",
    "TransformerEncoder": "write nn.Transformer",
    "Conv1d Conv2d MaxPool2d BatchNorm2d LSTM GRU RNN conv1d conv2d max_pool2d": "convolutions, "
    "pooling and recurrent nets are left out",
}
HINTS = {name: hint for names, hint in INSTEAD.items() for name in names.split()}
OF_CLASSES = {
    "Tensor": "register_hook retain_grad double",
    "Module": "register_forward_hook register_forward_pre_hook register_full_backward_hook "
    "register_parameter add_module double",
    "_Cuda": "synchronize empty_cache memory_allocated max_memory_allocated manual_seed_all amp",
}


class _Absent:
    """A name that a class does not have. An attribute of an instance or a subclass hides it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        text = f"{owner.__name__!r} object has no attribute {self.name!r}"
        raise AttributeError(f"{text}: {HINTS[self.name]}")


def missing(module: str, name: str) -> NoReturn:
    """Raise the AttributeError of a name that a module does not have."""
    hint = f": {HINTS[name]}" if name in HINTS else ""
    text = f"module {module!r} has no attribute {name!r}{hint}"
    raise AttributeError(text, name=name, obj=sys.modules[module])


def explain(*owners: type | ModuleType) -> None:
    """Let names of the table say what to write, where these classes and modules lack them."""
    for owner in owners:
        if isinstance(owner, ModuleType):
            vars(owner)["__getattr__"] = functools.partial(missing, owner.__name__)
        else:
            for name in OF_CLASSES[owner.__name__].split():
                if not hasattr(owner, name):
                    setattr(owner, name, _Absent(name))
