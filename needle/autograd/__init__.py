"""Tensors, the graph that computed them, and backward().

tensor       Op, Tensor, backward: the engine, no maths
graph        the order of a graph's nodes, what was written since the forward, buffers of gradients
grad_mode    whether results remember how they were computed
operators    what a Tensor does by NumPy's and PyTorch's names: calls of needle.ops
"""

from needle.autograd.tensor import (
    Accumulators,
    FusedOp,
    FusedTupleOp,
    NDArray,
    Op,
    Tensor,
    TensorOp,
    TensorTuple,
    TensorTupleOp,
    Value,
    compute_gradient_of_variables,
    enable_grad,
    find_topo_sort,
    grad,
    is_grad_enabled,
    no_grad,
)

__all__ = [
    "Accumulators",
    "FusedOp",
    "FusedTupleOp",
    "NDArray",
    "Op",
    "Tensor",
    "TensorOp",
    "TensorTuple",
    "TensorTupleOp",
    "Value",
    "compute_gradient_of_variables",
    "enable_grad",
    "find_topo_sort",
    "grad",
    "is_grad_enabled",
    "no_grad",
]
