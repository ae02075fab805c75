"""Every differentiable op, forward beside backward, a file a family. Re-exported by `needle`."""

import sys as _sys
from types import ModuleType as _ModuleType

from .. import autograd as _autograd
from ..block_mask import BlockMask, convert_to_block_mask
from .attention import (
    Attention,
    QKVAttention,
    Rotary,
    attention,
    block_sparse_attention,
    qkv_attention,
    rotary,
)
from .elementwise import (
    GELU,
    AddScalar,
    AsType,
    DivScalar,
    EWiseAdd,
    EWiseDiv,
    EWiseMul,
    EWisePow,
    EWiseSub,
    Exp,
    Log,
    MulScalar,
    Negate,
    PowerScalar,
    ReLU,
    ScalarDiv,
    ScalarPow,
    Sigmoid,
    Sqrt,
    Tanh,
    add,
    add_scalar,
    astype,
    divide,
    divide_scalar,
    exp,
    gelu,
    log,
    multiply,
    multiply_scalar,
    negate,
    power,
    power_scalar,
    relu,
    scalar_divide,
    scalar_power,
    sigmoid,
    sqrt,
    subtract,
    tanh,
)
from .embedding import EmbeddingOp, IndexAdd, IndexSelect, embedding, index_select
from .loss import CrossEntropy, cross_entropy
from .matmul import LinearOp, LinearTransposedOp, MatMul, linear, linear_transposed, matmul
from .normalization import LayerNorm, layer_norm
from .reduce import (
    LogSoftmax,
    LogSumExp,
    Max,
    Softmax,
    Summation,
    logsoftmax,
    logsumexp,
    max,
    mean,
    softmax,
    summation,
)
from .shape import (
    BroadcastTo,
    Flip,
    MakeTensorTuple,
    Permute,
    Reshape,
    Split,
    Stack,
    TensorTupleGetItem,
    Transpose,
    broadcast_to,
    flip,
    make_tuple,
    permute,
    reshape,
    split,
    stack,
    transpose,
    tuple_get_item,
)

__all__ = [
    _name
    for _name, _value in list(globals().items())
    if not _name.startswith("_") and not isinstance(_value, _ModuleType)
]

_autograd._ops = _sys.modules[__name__]
