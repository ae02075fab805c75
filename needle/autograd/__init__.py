"""Tensors, the graph that computed them, and backward().

tensor       Op, Tensor, backward: the engine, no maths
graph        the order of a graph's nodes, what was written since the forward, buffers of gradients
grad_mode    whether results remember how they were computed
operators    what a Tensor does by NumPy's and PyTorch's names: calls of needle.ops
"""

from needle.autograd.tensor import *  # noqa: F403
from needle.autograd.tensor import __all__ as __all__
