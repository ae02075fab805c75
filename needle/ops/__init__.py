"""Every differentiable op, forward beside backward, a file a family. Re-exported by `needle`.

The functions are those of the table in spellings.py and the rows of elementwise.py; `__all__` has
them and the classes of the families.
"""

import sys as _sys

from needle import block_mask as _block_mask
from needle.autograd import operators as _operators
from needle.ops import (
    attention,
    broadcast,
    dilated,
    einsum,
    elementwise,
    indexing,
    layer,
    loss,
    matmul,
    normalization,
    order,
    random,
    reduce,
    ring_attention,
    shape,
)
from needle.ops import spellings as _spellings
from needle.ops.common import classes_of as _classes_of

_files = {**vars(), "block_mask": _block_mask}
_functions = _spellings.functions(_files, elementwise.ROWS)
_names = {**_classes_of(_files.values()), **_functions}
_operators.ops = _sys.modules[__name__]
for _name, _method in _spellings.methods(_functions).items():
    setattr(_operators.Operators, _name, _method)
for _name, _value in _names.items():
    setattr(_operators.ops, _name, _value)
__all__ = sorted(_names)
