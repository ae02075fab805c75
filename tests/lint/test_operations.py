"""docs/operations.md lists every function of needle.ops, and names that are not here. Written by
`python tests/lint/test_operations.py`; the test compares."""

import inspect
from pathlib import Path

from needle import instead, ops

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
HEAD = """# Operations

Functions of `needle.ops`, and of `needle`, that take Tensors. Each runs on the CPU and on CUDA;
*host* says that it reads its operand or indices there. Reductions and shapes take `axis`, `axes` or
`dim`, `keepdims` or `keepdim`. A dash: no function by itself, or none in that library.
Convolutions, recurrent nets and linear algebra are not here.

Where the two libraries differ the meaning is NumPy's: `max`, `min`, `median` and `sort` return
values alone (`argmax`, `argsort` and `topk` have the places), `squeeze` refuses a longer axis,
`var` and `std` divide by n (`correction=1`: by n - 1), `nonzero` gives an array for each axis
(`as_tuple=False`: one), `repeat` repeats elements (`tile`: blocks), `meshgrid` begins with "xy".
With `dim=` it is PyTorch's: `max`, `min`, `median` and `sort` give (values, indices), `var` and
`std` divide by n - 1, and `squeeze` leaves a longer axis.

## Dtypes

Arithmetic and comparisons of two arrays promote their dtypes: float32 wins; bfloat16 with float16
gives float32; a float wins over integers and bool; of two integers the wider one wins (uint16 with
int32: int32); arithmetic of two bools gives int32. A Python float makes an integer array float32. A
Python int changes no dtype but bool, and raises OverflowError if the dtype cannot hold it. In place
the dtype stays, and a float into integers is a TypeError. Functions such as `exp` give float32 for
integers. `sum` of integers is int64, `mean` float32. Products, attention and norms never
promote: operands of different dtypes are a TypeError.

## Functions

`needle.nn.functional` has PyTorch's `pad`, `one_hot`, `linear`, `layer_norm`, `normalize`,
`scaled_dot_product_attention`, `cosine_similarity` and `nll_loss`, `needle.linalg` the vector
`norm`, `needle.nn.init` initialisers, `needle.nn.utils` the clipping of gradients.

Of a Tensor there are also `type`, `is_cuda`, `nbytes`, `grad_fn` and `2.0 in x`, of `needle`
`as_tensor`, `is_grad_enabled`, `set_printoptions` and `utils.data`. A module has
`register_buffer(name, x, persistent=True)`, `to(device, dtype)`, `half`, `bfloat16`, `float`,
`modules`, `named_children` and `buffers`; its lists of parts are iterators too, for `next()`.
`nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict` are modules, and lists or a dict, whose keys
are attributes. `ndl.save(obj, path)` takes a module, or dicts and lists of arrays.

| needle | PyTorch | NumPy | gradient | devices |
|---|---|---|---|---|
"""
ABSENT = """
## Not here

Names of PyTorch whose AttributeError says what to write instead.

| PyTorch | instead |
|---|---|
"""
SAME = """
    abs absolute all any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_to
    ceil clip cos divide dot einsum exp expm1 flip floor floor_divide isfinite isnan log log1p
    matmul maximum mean minimum multiply negative nonzero outer permute prod remainder reshape
    round sign sin sqrt square squeeze stack std subtract sum tanh tile tril triu true_divide var
    where add max min roll argsort cumsum sort unique reciprocal log2 log10 isinf isclose allclose
    logical_and logical_or logical_not swapaxes amax amin ravel hstack vstack moveaxis bincount
    count_nonzero cumprod diag diagonal median meshgrid nan_to_num tan tensordot trace trunc
""".split()
TORCH_ONLY = """
    cat chunk clamp cross_entropy div dropout erf flatten gather index_add index_select kl_div
    binary_cross_entropy binary_cross_entropy_with_logits l1_loss log_softmax logsumexp mse_loss mul
    neg norm pow relu repeat_interleave rsqrt scatter_add sigmoid silu softmax softplus sub
    unsqueeze gelu embedding topk bmm mm mv concat eq ne lt le gt ge unbind elu leaky_relu lerp
    scatter std_mean var_mean
""".split()
TORCH = {
    "negate": "neg", "power": "pow", "power_scalar": "pow", "summation": "sum", "pad": "pad",
    "concatenate": "cat", "logsoftmax": "log_softmax", "repeat": "repeat_interleave",
    "take_along_axis": "take_along_dim", "take_along_dim": "take_along_dim",
    "expand_dims": "unsqueeze", "transpose": "transpose",
    "astype": "Tensor.to", "to_device": "Tensor.to", "contiguous": "Tensor.contiguous",
    "linear": "linear", "layer_norm": "layer_norm", "get_item": "x[i]", "set_item": "x[i] = y",
    "split": "unbind", "attention": "scaled_dot_product_attention", "permute": "permute",
    "negative": "negative", "split_sizes": "split",
    "movedim": "movedim", "equal": "equal",
}  # fmt: skip
NUMPY = {
    "negate": "negative", "power": "power", "power_scalar": "power", "summation": "sum",
    "concatenate": "concatenate", "repeat": "repeat", "take_along_axis": "take_along_axis",
    "take_along_dim": "take_along_axis",
    "expand_dims": "expand_dims", "unsqueeze": "expand_dims", "transpose": "swapaxes",
    "permute": "transpose", "get_item": "x[i]", "set_item": "x[i] = y", "pad": "pad", "cat":
    "concatenate", "clamp": "clip", "index_select": "take", "norm": "linalg.norm", "pow": "power",
    "mul": "multiply", "sub": "subtract", "div": "divide", "neg": "negative", "astype":
    "ndarray.astype", "contiguous": "ascontiguousarray", "repeat_interleave": "repeat",
    "concat": "concatenate", "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal", "bmm": "matmul", "mm": "matmul", "mv": "matmul",
    "movedim": "moveaxis", "equal": "array_equal",
}  # fmt: skip
HOST = "bincount repeat repeat_interleave scatter set_item unique".split()
NOT_OPS = {"convert_to_block_mask", "ring_chunks"}


def page() -> str:
    lines, absent = [], []
    for name in ops.__all__:
        if not inspect.isroutine(getattr(ops, name)) or name in NOT_OPS:
            continue
        torch = TORCH.get(name, name if name in SAME + TORCH_ONLY else "-")
        numpy = NUMPY.get(name, name if name in SAME else "-")
        gradient = "no" if name in ops._WITHOUT_GRADIENT and name != "set_item" else "yes"
        devices = "CPU, CUDA" + (" (host)" if name in HOST else "")
        lines.append(f"| `{name}` | {torch} | {numpy} | {gradient} | {devices} |\n")
    for names, hint in instead.INSTEAD.items():
        absent.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {hint} |\n")
    return HEAD + "".join(lines) + ABSENT + "".join(absent)


def test_the_page_of_operations_is_current():
    assert PAGE.read_text() == page(), "write it anew: python tests/lint/test_operations.py"


if __name__ == "__main__":
    PAGE.write_text(page())
