"""Every differentiable op, forward beside backward, a file a family. Re-exported by `needle`."""

import sys as _sys

import needle.ops.attention as _attention
import needle.ops.broadcast as _broadcast
import needle.ops.elementwise as _elementwise
import needle.ops.embedding as _embedding
import needle.ops.loss as _loss
import needle.ops.matmul as _matmul
import needle.ops.normalization as _normalization
import needle.ops.reduce as _reduce
import needle.ops.shape as _shape
from needle.autograd import define_operators as _define_operators
from needle.block_mask import BlockMask, convert_to_block_mask
from needle.ops.attention import *
from needle.ops.broadcast import *
from needle.ops.elementwise import *
from needle.ops.embedding import *
from needle.ops.loss import *
from needle.ops.matmul import *
from needle.ops.normalization import *
from needle.ops.reduce import *
from needle.ops.shape import *

__all__ = ["BlockMask", "convert_to_block_mask"]
__all__ += _attention.__all__
__all__ += _broadcast.__all__
__all__ += _elementwise.__all__
__all__ += _embedding.__all__
__all__ += _loss.__all__
__all__ += _matmul.__all__
__all__ += _normalization.__all__
__all__ += _reduce.__all__
__all__ += _shape.__all__

_define_operators(_sys.modules[__name__])
