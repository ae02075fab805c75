"""docs/operations.md lists every function of needle.ops, and names that are not here. Its tables
are written by `python tests/lint/test_operations.py`; the test compares."""

import inspect
import re
from pathlib import Path

from needle import instead, ops

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
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
    """The page with its tables of functions and of absent names written anew."""
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
    text = PAGE.read_text()
    for head, rows in ("| needle | PyTorch |", lines), ("| PyTorch | instead |", absent):
        table = rf"(^{re.escape(head)}.*\n\|-.*\n)(\|.*\n)*"
        text = re.sub(table, lambda m, rows=rows: m[1] + "".join(rows), text, flags=re.M)
    return text


def test_the_page_of_operations_is_current():
    assert PAGE.read_text() == page(), "write it anew: python tests/lint/test_operations.py"


if __name__ == "__main__":
    PAGE.write_text(page())
