"""Every differentiable op, forward beside backward, a file a family. Re-exported by `needle`.

`__all__` has the names that the families give: what else is in a family's file stays there.
"""
# ruff: noqa: F405

import sys as _sys
from inspect import isfunction as _isfunction
from inspect import signature as _signature

from needle.block_mask import BlockMask, convert_to_block_mask
from needle.operators import define_operators as _define_operators
from needle.ops.attention import *
from needle.ops.broadcast import *
from needle.ops.common import WORDS as _WORDS
from needle.ops.common import with_other_words as _with_other_words
from needle.ops.dilated import *
from needle.ops.einsum import *
from needle.ops.elementwise import *
from needle.ops.elementwise import ROWS as _ROWS
from needle.ops.embedding import *
from needle.ops.indexing import *
from needle.ops.layer import *
from needle.ops.loss import *
from needle.ops.matmul import *
from needle.ops.mlp import *
from needle.ops.normalization import *
from needle.ops.order import *
from needle.ops.pointwise import *
from needle.ops.rearrange import *
from needle.ops.reduce import *
from needle.ops.ring_attention import *
from needle.ops.ring_dilated import *
from needle.ops.select import *
from needle.ops.shape import *
from needle.ops.statistics import *

# PyTorch's and NumPy's words for the same functions.
abs = absolute
bmm = mm = mv = matmul
cat = concat = concatenate
clamp = clip
div = divide
expand_dims = unsqueeze
log_softmax = logsoftmax
movedim = moveaxis
mul = multiply
neg = negative = negate
pow = power
ravel = flatten
repeat_interleave = repeat
sub = subtract
sum = summation
swapaxes = transpose
take_along_dim = take_along_axis
true_divide = divide
unbind = split

# Results outside of the graph, or in place.
_WITHOUT_GRADIENT = """
    all allclose any argmax argmin argsort bincount bitwise_and bitwise_not bitwise_or
    bitwise_xor count_nonzero eq equal floor_divide ge gt isclose isfinite isinf isnan le
    logical_and logical_not logical_or lt ne nonzero set_item unique
""".split()

# Written out for type checkers; a test compares it with what is there.
__all__ = [
    "AsType", "Attention", "BinaryCrossEntropy", "BlockMask", "BroadcastTo", "Clip", "Concatenate",
    "Contiguous", "CrossEntropy", "CumSum", "DilatedAttention", "EmbeddingOp", "Flip", "GELU",
    "GeluMLP", "GetItem", "IndexAdd", "IndexSelect", "Keep", "LayerNorm", "LayerNormResidual",
    "LinearCrossEntropy", "LinearCrossEntropyFP8", "LinearOp", "LinearTransposedOp", "LogSoftmax",
    "LogSumExp", "MakeTensorTuple", "MatMul", "Max", "Mean", "Min", "ParallelLayer", "Permute",
    "PlaceItem", "QKVAttention", "Reshape", "RingAttention", "RingDilatedAttention", "Rotary",
    "SetItem", "Softmax", "Sort", "Split", "Stack", "Summation", "TensorTupleGetItem", "ToDevice",
    "TopK", "Transpose", "Unsort", "Where", "abs", "absolute", "add", "add_scalar", "all",
    "allclose", "amax", "amin", "any", "argmax", "argmin", "argsort", "astype", "attention",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "bincount", "bitwise_and",
    "bitwise_not", "bitwise_or", "bitwise_xor", "block_sparse_attention", "bmm", "broadcast_to",
    "cached_layer", "cat", "ceil", "chunk", "clamp", "clip", "concat", "concatenate", "contiguous",
    "convert_to_block_mask", "cos", "count_nonzero", "cross_entropy", "cumprod", "cumsum", "diag",
    "diagonal", "dilated_attention", "div", "divide", "divide_scalar", "dot", "dropout", "einsum",
    "elu", "embedding", "eq", "equal", "erf", "exp", "expand_dims", "expm1", "flatten", "flip",
    "floor", "floor_divide", "gather", "ge", "gelu", "gelu_mlp", "get_item", "gt", "hstack",
    "index_add", "index_select", "isclose", "isfinite", "isinf", "isnan", "kl_div", "l1_loss",
    "layer", "layer_norm", "layer_norm_pair", "layer_norm_residual", "le", "leaky_relu", "lerp",
    "linear", "linear_cross_entropy", "linear_transposed", "log", "log10", "log1p", "log2",
    "log_softmax", "logical_and", "logical_not", "logical_or", "logsoftmax", "logsumexp", "lt",
    "make_tuple", "matmul", "max", "maximum", "mean", "median", "meshgrid", "min", "minimum", "mm",
    "moveaxis", "movedim", "mse_loss", "mul", "multiply", "multiply_scalar", "mv", "nan_to_num",
    "ne", "neg", "negate", "negative", "nonzero", "norm", "outer", "pad", "permute", "pow", "power",
    "power_scalar", "prod", "qkv_attention", "ravel", "reciprocal", "relu", "remainder", "repeat",
    "repeat_interleave", "reshape", "ring_attention", "ring_chunks", "ring_dilated_attention",
    "roll", "rotary", "round", "rsqrt", "scalar_divide", "scalar_power", "scatter", "scatter_add",
    "set_item", "sigmoid", "sign", "silu", "sin", "softmax", "softplus", "sort", "split",
    "split_sizes", "sqrt", "square", "squeeze", "stack", "std", "std_mean", "sub", "subtract",
    "subtract_scalar", "sum", "summation", "swapaxes", "take_along_axis", "take_along_dim", "tan",
    "tanh", "tensordot", "tile", "to_device", "topk", "trace", "transpose", "tril", "triu",
    "true_divide", "trunc", "tuple_get_item", "unbind", "unique", "unsqueeze", "var", "var_mean",
    "vstack", "where",
]  # fmt: skip

__all__ += [_name for _name in _ROWS if _name not in __all__]
_define_operators(_sys.modules[__name__], _ROWS)

for _name, _value in list(globals().items()):
    if _isfunction(_value) and _WORDS.keys() & {*_signature(_value).parameters}:
        globals()[_name] = _with_other_words(_value, _name)
    _is_file = getattr(_value, "__name__", "") == f"{__name__}.{_name}"
    if not (_name in __all__ or _name.startswith("_") or _is_file):
        del globals()[_name]
