"""The names of ops, a line each: functions of needle.ops, methods of Tensors, words of arguments.

Functions, methods, `__all__`, stubs and the table of docs/operations.md are made of these lines. A
row of elementwise.py has none of its own where its name is all: it is a function and a method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from needle.autograd.operators import Operators, augmented, cast, of_arrays, reflected, updating
from needle.ops.common import check_tensors


class Spelling(NamedTuple):
    """`means` is a function as FILE.NAME, or a method of Tensor. `torch` and `numpy` are the names
    there, = the same, - none. where: "method" of Tensor, or one that writes the result "in place";
    "array": NDArray has the method; "constant": the result is outside of the graph; "host": it
    reads its operand or indices there."""

    name: str
    means: str
    torch: str
    numpy: str
    where: str


# PyTorch's and NumPy's words for a word of the functions.
WORDS = {
    "axis": ("axes", "dim", "dims"),
    "axes": ("axis", "dim", "dims"),
    "axis1": ("dim1",),
    "axis2": ("dim2",),
    "correction": ("ddof", "unbiased"),
    "end": ("end_dim",),
    "k": ("diagonal", "offset"),
    "keepdims": ("keepdim",),
    "max": ("a_max",),
    "min": ("a_min",),
    "ord": ("p",),
    "src": ("value",),
    "start": ("start_dim",),
    "value": ("constant_values",),
    "widths": ("pad_width",),
}

# Python's names of dtypes, and the methods of Tensor that convert to them.
CASTS = {"bool": "bool", "float": "float32", "half": "float16", "int": "int32", "long": "int64"}

# Operators of Tensors: the functions of one operand, of two, those of arrays, and those in place.
UNARY = {"neg": "negate", "abs": "absolute", "invert": "bitwise_not"}
OPERATORS = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
OPERATORS |= {"pow": "power", "mod": "remainder"}
OPERATORS_OF_ARRAYS = ("floordiv", "and", "or", "xor")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
AUGMENTED = (*OPERATORS, *OPERATORS_OF_ARRAYS, "matmul")

TABLE = (
    ("BlockMask", "block_mask.BlockMask", "-", "-", ""),
    ("abs", "elementwise.absolute", "=", "=", "method"),
    ("absolute", "elementwise.absolute", "=", "=", "method"),
    ("add", "elementwise.add", "=", "=", "method"),
    ("add_scalar", "elementwise.add_scalar", "-", "-", ""),
    ("all", "reduce.all", "=", "=", "method constant"),
    ("allclose", "elementwise.allclose", "=", "=", "method constant"),
    ("amax", "reduce.amax", "=", "=", "method"),
    ("amin", "reduce.amin", "=", "=", "method"),
    ("any", "reduce.any", "=", "=", "method constant"),
    ("argmax", "reduce.argmax", "=", "=", "method array constant"),
    ("argmin", "reduce.argmin", "=", "=", "method array constant"),
    ("argsort", "order.argsort", "=", "=", "method constant"),
    ("astype", "broadcast.astype", "Tensor.to", "ndarray.astype", "method array"),
    ("attention", "attention.attention", "scaled_dot_product_attention", "-", ""),
    ("binary_cross_entropy", "loss.binary_cross_entropy", "=", "-", ""),
    ("binary_cross_entropy_with_logits", "loss.binary_cross_entropy_with_logits", "=", "-", ""),
    ("bincount", "order.bincount", "=", "=", "method constant host"),
    ("bitwise_and", "elementwise.bitwise_and", "=", "=", "constant"),
    ("bitwise_not", "elementwise.bitwise_not", "=", "=", "constant"),
    ("bitwise_or", "elementwise.bitwise_or", "=", "=", "constant"),
    ("bitwise_xor", "elementwise.bitwise_xor", "=", "=", "constant"),
    ("block_sparse_attention", "attention.block_sparse_attention", "-", "-", ""),
    ("bmm", "matmul.matmul", "=", "matmul", "method"),
    ("broadcast_to", "broadcast.broadcast_to", "=", "=", "method array"),
    ("cached_layer", "layer.cached_layer", "-", "-", "constant"),
    ("cat", "shape.concatenate", "=", "concatenate", ""),
    ("ceil", "elementwise.ceil", "=", "=", "method"),
    ("chunk", "shape.chunk", "=", "-", "method"),
    ("clamp", "elementwise.clip", "=", "clip", "method"),
    ("clip", "elementwise.clip", "=", "=", "method"),
    ("concat", "shape.concatenate", "=", "concatenate", ""),
    ("concatenate", "shape.concatenate", "cat", "=", ""),
    ("contiguous", "broadcast.contiguous", "Tensor.contiguous", "ascontiguousarray", "array"),
    ("convert_to_block_mask", "block_mask.convert_to_block_mask", "-", "-", ""),
    ("cos", "elementwise.cos", "=", "=", "method"),
    ("count_nonzero", "reduce.count_nonzero", "=", "=", "method constant"),
    ("cross_entropy", "loss.cross_entropy", "=", "-", ""),
    ("cumprod", "order.cumprod", "=", "=", "method"),
    ("cumsum", "order.cumsum", "=", "=", "method"),
    ("diag", "shape.diag", "=", "=", "method"),
    ("diagonal", "shape.diagonal", "=", "=", "method"),
    ("dilated_attention", "dilated.dilated_attention", "-", "-", ""),
    ("div", "elementwise.divide", "=", "divide", "method"),
    ("divide", "elementwise.divide", "=", "=", "method"),
    ("divide_scalar", "elementwise.divide_scalar", "-", "-", ""),
    ("dot", "einsum.dot", "=", "=", "method"),
    ("dropout", "random.dropout", "=", "-", ""),
    ("einsum", "einsum.einsum", "=", "=", ""),
    ("elu", "elementwise.elu", "=", "-", ""),
    ("embedding", "indexing.embedding", "=", "-", ""),
    ("eq", "elementwise.eq", "=", "equal", "method constant"),
    ("equal", "elementwise.equal", "=", "array_equal", "method constant"),
    ("erf", "elementwise.erf", "=", "-", "method"),
    ("exp", "elementwise.exp", "=", "=", "method array"),
    ("expand_dims", "shape.unsqueeze", "unsqueeze", "=", ""),
    ("expm1", "elementwise.expm1", "=", "=", "method"),
    ("flatten", "shape.flatten", "=", "-", "method"),
    ("flip", "shape.flip", "=", "=", "method array"),
    ("floor", "elementwise.floor", "=", "=", "method"),
    ("floor_divide", "elementwise.floor_divide", "=", "=", "constant"),
    ("gather", "indexing.gather", "=", "-", "method"),
    ("ge", "elementwise.ge", "=", "greater_equal", "method constant"),
    ("gelu", "elementwise.gelu", "=", "-", ""),
    ("gelu_mlp", "matmul.gelu_mlp", "-", "-", ""),
    ("get_item", "indexing.get_item", "x[i]", "x[i]", ""),
    ("gt", "elementwise.gt", "=", "greater", "method constant"),
    ("hstack", "shape.hstack", "=", "=", ""),
    ("index_add", "indexing.index_add", "=", "-", "method"),
    ("index_select", "indexing.index_select", "=", "take", "method array"),
    ("isclose", "elementwise.isclose", "=", "=", "method constant"),
    ("isfinite", "elementwise.isfinite", "=", "=", "method constant"),
    ("isinf", "elementwise.isinf", "=", "=", "method constant"),
    ("isnan", "elementwise.isnan", "=", "=", "method constant"),
    ("kl_div", "loss.kl_div", "=", "-", ""),
    ("l1_loss", "loss.l1_loss", "=", "-", ""),
    ("layer", "layer.layer", "-", "-", ""),
    ("layer_norm", "normalization.layer_norm", "=", "-", ""),
    ("le", "elementwise.le", "=", "less_equal", "method constant"),
    ("leaky_relu", "elementwise.leaky_relu", "=", "-", ""),
    ("lerp", "elementwise.lerp", "=", "-", "method"),
    ("linear", "matmul.linear", "=", "-", ""),
    ("linear_cross_entropy", "loss.linear_cross_entropy", "-", "-", ""),
    ("linear_transposed", "matmul.linear_transposed", "-", "-", ""),
    ("log", "elementwise.log", "=", "=", "method array"),
    ("log10", "elementwise.log10", "=", "=", "method"),
    ("log1p", "elementwise.log1p", "=", "=", "method"),
    ("log2", "elementwise.log2", "=", "=", "method"),
    ("log_softmax", "reduce.logsoftmax", "=", "-", "method"),
    ("logical_and", "elementwise.logical_and", "=", "=", "method constant"),
    ("logical_not", "elementwise.logical_not", "=", "=", "method constant"),
    ("logical_or", "elementwise.logical_or", "=", "=", "method constant"),
    ("logsoftmax", "reduce.logsoftmax", "log_softmax", "-", ""),
    ("logsumexp", "reduce.logsumexp", "=", "-", "method"),
    ("lt", "elementwise.lt", "=", "less", "method constant"),
    ("make_tuple", "shape.make_tuple", "-", "-", ""),
    ("matmul", "matmul.matmul", "=", "=", "method"),
    ("max", "reduce.max", "=", "=", "method array"),
    ("maximum", "elementwise.maximum", "=", "=", "method array"),
    ("mean", "reduce.mean", "=", "=", "method array"),
    ("median", "reduce.median", "=", "=", "method"),
    ("meshgrid", "shape.meshgrid", "=", "=", ""),
    ("min", "reduce.min", "=", "=", "method array"),
    ("minimum", "elementwise.minimum", "=", "=", "method array"),
    ("mm", "matmul.matmul", "=", "matmul", "method"),
    ("moveaxis", "shape.moveaxis", "=", "=", "method"),
    ("movedim", "shape.moveaxis", "=", "moveaxis", "method"),
    ("mse_loss", "loss.mse_loss", "=", "-", ""),
    ("mul", "elementwise.multiply", "=", "multiply", "method"),
    ("multiply", "elementwise.multiply", "=", "=", "method"),
    ("multiply_scalar", "elementwise.multiply_scalar", "-", "-", ""),
    ("mv", "matmul.matmul", "=", "matmul", "method"),
    ("nan_to_num", "elementwise.nan_to_num", "=", "=", "method"),
    ("ne", "elementwise.ne", "=", "not_equal", "method constant"),
    ("neg", "elementwise.negate", "=", "negative", "method"),
    ("negate", "elementwise.negate", "neg", "negative", "method"),
    ("negative", "elementwise.negate", "=", "=", "method"),
    ("nonzero", "order.nonzero", "=", "=", "method constant"),
    ("norm", "reduce.norm", "=", "linalg.norm", "method"),
    ("outer", "einsum.outer", "=", "=", "method"),
    ("pad", "shape.pad", "=", "=", "method array"),
    ("permute", "shape.permute", "=", "transpose", "array"),
    ("pow", "elementwise.power", "=", "power", "method"),
    ("power", "elementwise.power", "pow", "=", "method"),
    ("power_scalar", "elementwise.power_scalar", "pow", "power", ""),
    ("prod", "reduce.prod", "=", "=", "method"),
    ("qkv_attention", "attention.qkv_attention", "-", "-", ""),
    ("ravel", "shape.flatten", "=", "=", "method"),
    ("reciprocal", "elementwise.reciprocal", "=", "=", "method"),
    ("relu", "elementwise.relu", "=", "-", "method"),
    ("remainder", "elementwise.remainder", "=", "=", "method"),
    ("repeat", "shape.repeat", "repeat_interleave", "=", "method host"),
    ("repeat_interleave", "shape.repeat", "=", "repeat", "method host"),
    ("reshape", "broadcast.reshape", "=", "=", "array"),
    ("ring_attention", "ring_attention.ring_attention", "-", "-", ""),
    ("ring_chunks", "ring_attention.ring_chunks", "-", "-", ""),
    ("ring_dilated_attention", "dilated.ring_dilated_attention", "-", "-", ""),
    ("roll", "shape.roll", "=", "=", "method"),
    ("rotary", "attention.rotary", "-", "-", ""),
    ("round", "elementwise.round", "=", "=", "method"),
    ("rsqrt", "elementwise.rsqrt", "=", "-", "method"),
    ("scalar_divide", "elementwise.scalar_divide", "-", "-", ""),
    ("scalar_power", "elementwise.scalar_power", "-", "-", ""),
    ("scatter", "indexing.scatter", "=", "-", "method host"),
    ("scatter_add", "indexing.scatter_add", "=", "-", "method"),
    ("set_item", "indexing.set_item", "x[i] = y", "x[i] = y", "host"),
    ("sigmoid", "elementwise.sigmoid", "=", "-", "method"),
    ("sign", "elementwise.sign", "=", "=", "method"),
    ("silu", "elementwise.silu", "=", "-", "method"),
    ("sin", "elementwise.sin", "=", "=", "method"),
    ("softmax", "reduce.softmax", "=", "-", "method"),
    ("softplus", "elementwise.softplus", "=", "-", "method"),
    ("sort", "order.sort", "=", "=", "method"),
    ("split", "shape.split", "unbind", "-", ""),
    ("split_sizes", "shape.split_sizes", "split", "-", ""),
    ("sqrt", "elementwise.sqrt", "=", "=", "method array"),
    ("square", "elementwise.square", "=", "=", "method"),
    ("squeeze", "shape.squeeze", "=", "=", "method"),
    ("stack", "shape.stack", "=", "=", ""),
    ("std", "reduce.std", "=", "=", "method"),
    ("std_mean", "reduce.std_mean", "=", "-", ""),
    ("sub", "elementwise.subtract", "=", "subtract", "method"),
    ("subtract", "elementwise.subtract", "=", "=", "method"),
    ("subtract_scalar", "elementwise.subtract_scalar", "-", "-", ""),
    ("sum", "broadcast.summation", "=", "=", "method array"),
    ("summation", "broadcast.summation", "sum", "sum", ""),
    ("swapaxes", "shape.transpose", "=", "=", "method"),
    ("take_along_axis", "indexing.take_along_axis", "take_along_dim", "=", "method"),
    ("take_along_dim", "indexing.take_along_axis", "=", "take_along_axis", "method"),
    ("tan", "elementwise.tan", "=", "=", "method"),
    ("tanh", "elementwise.tanh", "=", "=", "method array"),
    ("tensordot", "einsum.tensordot", "=", "=", ""),
    ("tile", "shape.tile", "=", "=", "method"),
    ("to_device", "broadcast.to_device", "Tensor.to", "-", ""),
    ("topk", "order.topk", "=", "-", "method"),
    ("trace", "shape.trace", "=", "=", "method"),
    ("transpose", "shape.transpose", "=", "swapaxes", ""),
    ("tril", "shape.tril", "=", "=", "method"),
    ("triu", "shape.triu", "=", "=", "method"),
    ("true_divide", "elementwise.divide", "=", "=", "method"),
    ("trunc", "elementwise.trunc", "=", "=", "method"),
    ("tuple_get_item", "shape.tuple_get_item", "-", "-", ""),
    ("unbind", "shape.split", "=", "-", "method"),
    ("unique", "order.unique", "=", "=", "method constant host"),
    ("unsqueeze", "shape.unsqueeze", "=", "expand_dims", "method"),
    ("var", "reduce.var", "=", "=", "method"),
    ("var_mean", "reduce.var_mean", "=", "-", ""),
    ("vstack", "shape.vstack", "=", "=", ""),
    ("where", "elementwise.where", "=", "=", ""),
    # Methods alone.
    ("add_", "Tensor.__iadd__", "=", "-", "method"),
    ("clamp_", "elementwise.clip", "=", "-", "in place"),
    ("copy_", "Tensor.fill_", "=", "-", "method"),
    ("div_", "Tensor.__itruediv__", "=", "-", "method"),
    ("index_add_", "indexing.index_add", "=", "-", "in place"),
    ("masked_fill_", "Tensor.masked_fill", "=", "-", "in place"),
    ("mul_", "Tensor.__imul__", "=", "-", "method"),
    ("scatter_", "indexing.scatter", "=", "-", "in place"),
    ("scatter_add_", "indexing.scatter_add", "=", "-", "in place"),
    ("sub_", "Tensor.__isub__", "=", "-", "method"),
    ("type", "Tensor.astype", "=", "-", "method"),
    ("view", "Tensor.reshape", "=", "-", "method"),
)
SPELLINGS = {row[0]: Spelling(*row) for row in TABLE}


def words_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return the other words that a function takes, and its own for each."""
    own = inspect.signature(function).parameters
    return {o: word for word in WORDS if word in own for o in WORDS[word] if o not in own}


def with_other_words(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function called `name`, which takes the other words too, if there are any; then an
    operand `a` that is no Tensor is refused by that name."""
    words = words_of(function)
    if not words:
        return function
    takes_a = "a" in inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        for other in words.keys() & given.keys() if given else ():
            if words[other] in given:
                both = " and ".join(sorted((words[other], other)))
                raise TypeError(f"{name}: {both} are the same: give one of them")
            given[words[other]] = given.pop(other)
        try:
            return function(*args, **given)
        except AttributeError:
            if takes_a:
                check_tensors(name, a=args[0] if args else given.get("a"))
            raise

    return called


def functions(files: dict[str, ModuleType], rows: dict[str, Any]) -> dict[str, Any]:
    """Return the functions by name. files: of needle/ops, by name; rows: of elementwise.py."""
    found = {name: row for name, row in rows.items() if name not in SPELLINGS}
    for name, means, *_, where in SPELLINGS.values():
        file, _, function = means.partition(".")
        if file in files and where != "in place":
            found[name] = with_other_words(getattr(files[file], function), name)
    return found


def methods(made: dict[str, Any]) -> dict[str, Any]:
    """Return the methods and operators of Tensor by name. made: the functions."""
    found = {n: f for n, f in made.items() if n not in SPELLINGS or "method" in SPELLINGS[n].where}
    found |= {f"__{name}__": made[function] for name, function in (UNARY | OPERATORS).items()}
    found |= {"__getitem__": made["get_item"], "__setitem__": made["set_item"]}
    found |= {f"__r{name}__": reflected(made[function]) for name, function in OPERATORS.items()}
    for side in ("", "r"):
        for name in OPERATORS_OF_ARRAYS:
            found[f"__{side}{name}__"] = of_arrays(f"__{side}{name}__")
    found |= {f"__{name}__": of_arrays(f"__{name}__") for name in COMPARISONS}
    found |= {f"__i{name}__": augmented(name) for name in AUGMENTED}
    found |= {name: cast(dtype) for name, dtype in {**CASTS, "bfloat16": "bfloat16"}.items()}
    for name, means, *_, where in SPELLINGS.values():
        file, _, meant = means.partition(".")
        if file == "Tensor" or where == "in place":
            function = found.get(meant) or vars(Operators).get(meant) or made[meant]
            found[name] = updating(function) if where == "in place" else function
    return found
