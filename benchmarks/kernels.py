"""Time of every op on CUDA at Pythia-70M's shapes, beside the same operation in PyTorch.

    python benchmarks/kernels.py                       all families, batch 16 x 2048, bfloat16
    python benchmarks/kernels.py --only matmul --batch-size 32
    python benchmarks/kernels.py --alone               needle only, torch not imported

Times come from events on each library's stream, after a warm-up; a sample repeats the operation
long enough to hide the launch, needle's and PyTorch's samples alternate, and the table shows
medians. GB/s counts the bytes that an operation must move and TFLOP/s the operations that it must
do (a multiply and an add are two; causal attention at half), whatever the kernel really does.
x torch is PyTorch's time over needle's: above 1, needle is faster. The last lines say which are
below 0.9, and which ops the table leaves out and why.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import bench
import numpy as np
from bench import Call

from needle import _C

C, HEADS, HEAD_DIM, VOCABULARY, PARAMETERS = 512, 8, 64, 50304, 70_426_624
ROTARY = 8  # angles: the first 16 of 64 dims are rotated
SAMPLE_MS = 5.0  # a sample repeats the operation about so long
SLOW = 0.9  # of PyTorch's speed
LEFT_OUT = {
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), "of integers; the kernel of add"),
    "block_sparse_attention_fwd": "beside dense attention in benchmarks/attention.py",
    "block_sparse_attention_bwd": "beside dense attention in benchmarks/attention.py",
    "block_lists": "once a mask",
    **dict.fromkeys(
        (
            "fp8_quantize",
            "fp8_layer_weights",
            "fp8_matmul",
            "fp8_linear_gelu_fwd",
            "fp8_linear_gelu_bwd",
            "fp8_cross_entropy",
        ),
        "whole steps in benchmarks/train_step.py",
    ),
    **dict.fromkeys(
        ("decode_projections", "decode_attention"),
        "several calls in PyTorch; whole steps in benchmarks/generate.py",
    ),
}
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
Theirs = Callable[[Any], Call]  # given the torch module


@dataclasses.dataclass
class Case:
    """One row of the table. `work` is in bytes, or in operations when `flops`."""

    name: str
    work: float
    run: Call
    baseline: Theirs | None = None
    flops: bool = False


class Shapes:
    def __init__(self, batch: int, time: int, dtype: str) -> None:
        self.batch, self.time, self.rows, self.dtype = batch, time, batch * time, dtype
        self.size = ITEM_SIZE[dtype]
        self.device = _C.cuda()
        self.random = np.random.default_rng(0)

    def array(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> _C.NDArray:
        seed = int(self.random.integers(1 << 30))
        return bench.normal(self.device, shape, dtype or self.dtype, scale, seed)

    def ids(self, high: int) -> _C.NDArray:
        """Token ids distributed as in text: the k-th most frequent comes about 1/k as often."""
        drawn = np.minimum(self.random.zipf(1.1, self.rows) - 1, high - 1)
        return _C.array(drawn.astype(np.int32), dtype="int32", device=self.device)

    def torch(self, make: Callable[..., Call], *shapes: tuple, dtype: str | None = None) -> Theirs:
        """make(torch, a tensor of each shape) gives PyTorch's call."""

        def given(torch):
            kind = getattr(torch, dtype or self.dtype)
            tensors = [torch.empty(x, dtype=kind, device="cuda").normal_() for x in shapes]
            return make(torch, *tensors)

        return given


def copies(s: Shapes) -> Iterator[Case]:
    n, size, wide = s.rows * 4 * C, s.size, (s.rows, 4 * C)
    x, x32, y = s.array(*wide), s.array(*wide, dtype="float32"), s.array(*wide)
    packed = (s.batch, s.time, HEADS, HEAD_DIM)
    heads, apart = s.array(*packed), s.array(s.batch, HEADS, s.time, HEAD_DIM)

    def copy(t, a):
        b = t.empty(a.shape, dtype=getattr(t, s.dtype), device="cuda")
        return lambda: b.copy_(a)

    yield Case("assign", 2 * size * n, lambda: _C.assign(y, x), s.torch(copy, wide))
    fill = s.torch(lambda t, a: lambda: a.fill_(1.0), wide)
    yield Case("fill", size * n, lambda: _C.fill(y, 1.0), fill)
    cast = s.torch(copy, wide, dtype="float32")
    yield Case("assign float32 ->", (4 + size) * n, lambda: _C.assign(y, x32), cast)
    yield Case(
        "assign (B,T,H,D) -> (B,H,T,D)",
        2 * size * s.rows * C,
        lambda: _C.assign(apart, heads.permute((0, 2, 1, 3))),
        s.torch(lambda t, a: lambda: a.transpose(1, 2).contiguous(), packed),
    )


# Calls of PyTorch, given the torch module, two matrices and a row.


def unary(name: str) -> Callable:
    return lambda t, a, b, c: getattr(t, name)(a)


def binary(name: str) -> Callable:
    return lambda t, a, b, c: getattr(t, name)(a, b)


SAME_NAMES = "relu exp log sqrt tanh sigmoid sign floor ceil round sin cos erf log1p expm1 rsqrt"
UNARY = {
    **{op: unary(op) for op in SAME_NAMES.split()},
    "negate": unary("neg"),
    "absolute": unary("abs"),
    "gelu": lambda t, a, b, c: t.nn.functional.gelu(a),
    "gelu_tanh": lambda t, a, b, c: t.nn.functional.gelu(a, approximate="tanh"),
    "silu": lambda t, a, b, c: t.nn.functional.silu(a),
    "softplus": lambda t, a, b, c: t.nn.functional.softplus(a),
}
BINARY = {
    **{op: binary(op) for op in ("add", "maximum", "minimum", "floor_divide", "remainder")},
    "subtract": binary("sub"),
    "multiply": binary("mul"),
    "divide": binary("div"),
    "power": binary("pow"),
    "gelu_bwd": lambda t, a, b, c: t.ops.aten.gelu_backward(b, a),
    "gelu_tanh_bwd": lambda t, a, b, c: t.ops.aten.gelu_backward(b, a, approximate="tanh"),
}
COMPARISONS = {
    op: binary(name)
    for name, op in zip(
        ("eq", "ne", "lt", "le", "gt", "ge"),
        ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    )
}


def elementwise(s: Shapes) -> Iterator[Case]:
    n, size, wide = s.rows * 4 * C, s.size, (s.rows, 4 * C)
    x, y, row = s.array(*wide), s.array(*wide), s.array(4 * C)

    def theirs(call):
        return s.torch(lambda t, *x: lambda: call(t, *x), wide, wide, (4 * C,))

    for table, operands, work in (
        (UNARY, (x,), 2 * size),
        (BINARY, (x, y), 3 * size),
        (COMPARISONS, (x, y), 2 * size + 1),
    ):
        for op, call in table.items():
            yield Case(op, work * n, functools.partial(getattr(_C, op), *operands), theirs(call))
    yield Case("add a row", 2 * size * n, lambda: _C.add(x, row), theirs(lambda t, a, b, c: a + c))


def reductions(s: Shapes) -> Iterator[Case]:
    work = s.size * s.rows * 4 * C
    wide, narrow = (s.rows, 4 * C), (4 * s.rows, C)
    x = s.array(*wide)
    columns, short = x.permute((1, 0)), x.reshape(narrow)
    baselines = {
        "sum": lambda t, a, axis: t.sum(a, axis),
        "sumsq": lambda t, a, axis: t.linalg.vector_norm(a, dim=axis),  # and a root an output
        "max": lambda t, a, axis: t.amax(a, axis),
        "min": lambda t, a, axis: t.amin(a, axis),
        "argmax": lambda t, a, axis: t.argmax(a, axis),
        "argmin": lambda t, a, axis: t.argmin(a, axis),
    }
    for op, call in baselines.items():
        for name, array, axis in (("rows", x, 1), ("columns", columns, 0)):
            theirs = s.torch(lambda t, a, call=call, axis=axis: lambda: call(t, a, axis), wide)
            yield Case(
                f"{op} of {name}", work, functools.partial(getattr(_C, op), array, 1), theirs
            )
    theirs = s.torch(lambda t, a: lambda: a.sum(1), narrow)
    yield Case("sum of rows of 512", work, lambda: _C.sum(short, 1), theirs)
    theirs = s.torch(lambda t, a: lambda: t.sum(a), wide)
    yield Case("sum of all", work, lambda: _C.sum(x, 2), theirs)


def products(s: Shapes) -> Iterator[Case]:
    rows = s.rows
    for k, m in ((C, 3 * C), (C, 4 * C), (4 * C, C), (C, VOCABULARY)):
        x, w, b = s.array(rows, k), s.array(k, m, scale=0.02), s.array(m)
        dy, dw = s.array(rows, m), s.array(1, k, m, dtype="float32")
        x_t = x.reshape((1, rows, k)).permute((0, 2, 1))
        w_t, dy3 = w.reshape((1, k, m)).permute((0, 2, 1)), dy.reshape((1, rows, m))
        biased = m != VOCABULARY
        work, call = 2.0 * rows * k * m, functools.partial
        yield Case(
            f"linear_fwd {k} -> {m}",
            work,
            call(_C.linear_fwd, x, w, b if biased else None, None),
            s.torch(
                lambda t, a, v, c, biased=biased: (
                    lambda: t.nn.functional.linear(a, v, c if biased else None)
                ),
                (rows, k), (m, k), (m,),
            ),
            flops=True,
        )  # fmt: skip
        theirs = s.torch(lambda t, d, v: lambda: d @ v, (rows, m), (m, k))
        yield Case(f"matmul dx {k} -> {m}", work, call(_C.matmul, dy3, w_t, None), theirs, True)
        theirs = s.torch(lambda t, d, a: lambda: d.t() @ a, (rows, m), (rows, k))
        dw_call = call(_C.matmul_acc, x_t, dy3, None, 1, dw)
        yield Case(f"matmul_acc dw {k} -> {m}", work, dw_call, theirs, True)
    x, w, b = s.array(rows, C), s.array(C, 4 * C, scale=0.02), s.array(4 * C)
    dgelu, w_back = s.array(rows, 4 * C), s.array(4 * C, C, scale=0.02)
    db, work = s.array(4 * C, dtype="float32"), 2.0 * rows * C * 4 * C

    def gelu(t, a, v, c):
        f = t.nn.functional
        return lambda: f.gelu(f.linear(a, v, c), approximate="tanh")

    for form, tanh in (("erf", 0), ("tanh", 1)):
        run = functools.partial(_C.linear_gelu_fwd, x, w, b, tanh, s.array(rows, 4 * C))
        theirs = s.torch(gelu, (rows, C), (4 * C, C), (4 * C,))
        yield Case(f"linear_gelu_fwd {form}", work, run, theirs, flops=True)
    run = functools.partial(_C.linear_gelu_bwd, x, w_back, dgelu, db)
    shapes = (rows, C), (C, 4 * C), (rows, 4 * C)
    theirs = s.torch(lambda t, d, v, p: lambda: ((d @ v) * p).sum(0), *shapes)
    yield Case("linear_gelu_bwd", work, run, theirs, flops=True)
    for m in (C, 3 * C, 4 * C):
        run = functools.partial(_C.bias_bwd, s.array(rows, m), s.array(m, dtype="float32"), None)
        theirs = s.torch(lambda t, d: lambda: d.sum(0), (rows, m))
        yield Case(f"bias_bwd {m}", s.size * rows * m, run, theirs)


def norms(s: Shapes) -> Iterator[Case]:
    n, size, matrix = s.rows * C, s.size, (s.rows, C)
    x, dy, dy2, dres = (s.array(*matrix) for _ in range(4))
    w, b, w2, b2 = (s.array(C) for _ in range(4))
    dw, db, dw2, db2 = (s.array(C, dtype="float32") for _ in range(4))
    _, mean, rstd = _C.layernorm_fwd(x, w, b, 1e-5)

    def forward(t, a, v, c):
        return lambda: t.nn.functional.layer_norm(a, (C,), v, c)

    def backward(t, a, v, c, d):
        _, m, r = t.native_layer_norm(a, (C,), v, c, 1e-5)
        call, wanted = t.ops.aten.native_layer_norm_backward, [True, True, True]
        return lambda: call(d, a, (C,), m, r, v, c, wanted)

    theirs = s.torch(forward, matrix, (C,), (C,))
    yield Case("layernorm_fwd", 2 * size * n, lambda: _C.layernorm_fwd(x, w, b, 1e-5), theirs)
    run = functools.partial(_C.layernorm_bwd, dy, x, w, mean, rstd, None, dw, db)
    theirs = s.torch(backward, matrix, (C,), (C,), matrix)
    yield Case("layernorm_bwd", 3 * size * n, run, theirs)
    run = functools.partial(_C.layernorm_pair_fwd, x, w, b, w2, b2, 1e-5)
    yield Case("layernorm_pair_fwd", 3 * size * n, run)
    run = functools.partial(_C.layernorm_pair_fp8, x, w, b, w2, b2, 1e-5)
    yield Case("layernorm_pair_fp8", (size + 4) * n, run)
    operands = dy, dy2, x, w, w2, mean, rstd, dres, dw, db, dw2, db2
    yield Case("layernorm_pair_bwd", 5 * size * n, lambda: _C.layernorm_pair_bwd(*operands))


def attention(s: Shapes) -> Iterator[Case]:
    qkv = s.array(s.batch, s.time, HEADS, 3, HEAD_DIM)
    cos, sin = (s.array(s.time, ROTARY, dtype="float32") for _ in range(2))
    shape = (s.batch, s.time, HEADS, HEAD_DIM)
    q, k, v = (qkv[:, :, :, i : i + 1].reshape(shape) for i in range(3))
    scale = HEAD_DIM**-0.5
    o, dq, dk, dv = (_C.empty(q.shape, s.dtype, s.device) for _ in range(4))
    lse = _C.attention_fwd(q, k, v, scale, 1, o)
    work = 2.0 * 2 * s.batch * HEADS * s.time * s.time * HEAD_DIM / 2

    def forward(t, a, b, c):
        return lambda: t.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)

    def backward(t, *qkv):
        out = forward(t, *(x.requires_grad_() for x in qkv))()
        d = t.randn_like(out)
        return lambda: t.autograd.grad(out, qkv, d, retain_graph=True)

    rotated = qkv.size * 2 // 3 * 2 * ROTARY // HEAD_DIM  # of q and k
    yield Case("rotary", 2 * s.size * rotated, lambda: _C.rotary(qkv, cos, sin, 2, 1.0))
    x, w = s.array(s.batch, s.time, C), s.array(C, HEADS, 3, HEAD_DIM, scale=0.02)
    b = s.array(HEADS, 3, HEAD_DIM)

    def projection(t, a, v, e):
        angle = t.rand(s.time, 1, 1, ROTARY, device="cuda")
        c, d = angle.cos().to(a.dtype), angle.sin().to(a.dtype)

        def run():
            y = t.nn.functional.linear(a, v, e).view(s.batch, s.time, HEADS, 3, HEAD_DIM)
            first, second = y[..., :2, : 2 * ROTARY].split(ROTARY, -1)
            both = first * c - second * d, second * c + first * d
            y[..., :2, : 2 * ROTARY] = t.cat(both, -1)
            return y

        return run

    run = functools.partial(_C.linear_rotary_fwd, x, w, b, cos, sin, 2)
    theirs = s.torch(projection, (s.batch, s.time, C), (3 * C, C), (3 * C,))
    yield Case("linear_rotary_fwd", 2.0 * s.rows * C * 3 * C, run, theirs, flops=True)
    heads = [(s.batch, HEADS, s.time, HEAD_DIM)] * 3
    run = functools.partial(_C.attention_fwd, q, k, v, scale, 1, o)
    yield Case("attention_fwd", work, run, s.torch(forward, *heads), flops=True)
    tail = scale, 1, None, None, dq, dk, dv, None
    run = functools.partial(_C.attention_bwd, o, q, k, v, o, lse, *tail)
    yield Case("attention_bwd", 2.5 * work, run, s.torch(backward, *heads), flops=True)


def dilated(s: Shapes) -> Iterator[Case]:
    """Branches of LongNet's kind. Bytes are those of what they hold, and of the result."""
    numbers = (s.time // 4, s.time // 2, s.time), (1, 2, 4)
    segments, dilations = (_C.array(list(n), "int32", s.device) for n in numbers)
    shape = (len(numbers[0]), s.batch, s.time, HEADS, HEAD_DIM)
    parts, lse = s.array(*shape), s.array(*shape[:-1], dtype="float32")
    rows = s.rows * HEADS
    held = sum(1 / dilation for dilation in numbers[1])
    work = (held + 1) * rows * HEAD_DIM * s.size
    yield Case("dilated_sum", work, lambda: _C.dilated_sum(parts, segments, dilations))
    run = functools.partial(_C.dilated_merge, parts, lse, segments, dilations)
    yield Case("dilated_merge", work + (held + 1) * rows * 4, run)


def tokens(torch, ids: _C.NDArray):
    return torch.from_numpy(ids.numpy().astype(np.int64)).cuda()


def embeddings(s: Shapes) -> Iterator[Case]:
    ids, w, dy = s.ids(VOCABULARY), s.array(VOCABULARY, C), s.array(s.rows, C)
    dw = s.array(VOCABULARY, C, dtype="float32")
    unique = len(np.unique(ids.numpy()))

    def forward(t, v):
        i = tokens(t, ids)
        return lambda: t.nn.functional.embedding(i, v)

    def backward(t, d):
        i = tokens(t, ids)
        return lambda: t.ops.aten.embedding_dense_backward(d, i, VOCABULARY, -1, False)

    work, theirs = s.size * s.rows * C, s.torch(forward, (VOCABULARY, C))
    yield Case("embedding_fwd", 2 * work, lambda: _C.embedding_fwd(ids, w), theirs)
    places = ids.astype("int64").reshape((1, 1, s.rows, 1, 1)).broadcast_to((1, 1, s.rows, 1, C))
    table = w.reshape((1, 1, VOCABULARY, 1, C))
    theirs = s.torch(
        lambda t, v: functools.partial(t.index_select, v, 0, tokens(t, ids)), (VOCABULARY, C)
    )
    yield Case("take, rows", 2 * work, lambda: _C.take(table, places), theirs)
    run, theirs = functools.partial(_C.embedding_bwd, ids, dy, dw), s.torch(backward, (s.rows, C))
    yield Case("embedding_bwd", work + 8 * unique * C, run, theirs)


def order(s: Shapes) -> Iterator[Case]:
    """Work: each element and its index once, whatever the number of passes."""

    def topk(t, a, k):
        return lambda: t.topk(a, k)

    for rows, n in ((s.rows * C // 64, 64), (s.rows // 4, 4096), (128, VOCABULARY), (1, 1 << 23)):
        x, size = s.array(rows, n), rows * n
        values, indices = s.array(rows, n), _C.empty((rows, n), "int64", s.device)
        theirs = s.torch(lambda t, a: lambda: t.sort(a), (rows, n))
        run = functools.partial(_C.sort, x, 0, values, indices)
        yield Case(f"sort {rows} x {n}", (2 * s.size + 8) * size, run, theirs)
        five = [array.reshape((1, rows, n, 1, 1)) for array in (values, indices, x)]
        theirs = s.torch(
            lambda t, a, b: functools.partial(a.scatter_, 1, t.argsort(b, 1), b), (rows, n),
            (rows, n),
        )  # fmt: skip
        yield Case(
            f"put {rows} x {n}", (2 * s.size + 8) * size, functools.partial(_C.put, *five), theirs
        )
        theirs = s.torch(lambda t, a: functools.partial(t.gather, a, 1, t.argsort(a, 1)), (rows, n))
        run = functools.partial(_C.take, five[2], five[1])
        yield Case(f"take {rows} x {n}", (2 * s.size + 8) * size, run, theirs)
        for k in (40, 1000):
            if k < n:
                places = _C.empty((rows, k), "int64", s.device)
                run = functools.partial(_C.sort, x, 1, s.array(rows, k), places)
                theirs = s.torch(functools.partial(topk, k=k), (rows, n))
                yield Case(f"sort {rows} x {n}, first {k}", s.size * size, run, theirs)
        theirs = s.torch(lambda t, a: lambda: t.cumsum(a, 1), (rows, n))
        run = functools.partial(_C.cumsum, x)
        yield Case(f"cumsum {rows} x {n}", 2 * s.size * size, run, theirs)


def losses(s: Shapes) -> Iterator[Case]:
    logits, targets = s.array(s.rows, VOCABULARY), s.ids(VOCABULARY)
    _, lse, _, count = _C.cross_entropy_fwd(logits, targets)
    dloss = _C.array(1.0, dtype="float32", device=s.device)
    work, shape = s.size * s.rows * VOCABULARY, (s.rows, VOCABULARY)

    def forward(t, a):
        i = tokens(t, targets)
        return lambda: t.nn.functional.cross_entropy(a, i)

    def backward(t, a):
        loss = forward(t, a.requires_grad_())()
        return lambda: t.autograd.grad(loss, a, retain_graph=True)

    run = functools.partial(_C.cross_entropy_fwd, logits, targets)
    yield Case("cross_entropy_fwd", work, run, s.torch(forward, shape))
    run = functools.partial(_C.cross_entropy_bwd, logits, targets, lse, count, dloss)
    yield Case("cross_entropy_bwd", 2 * work, run, s.torch(backward, shape))
    rows = _C.array(logits, s.dtype, s.device)  # overwritten by each call
    run = functools.partial(_C.cross_entropy_fwd_bwd, rows, targets)
    yield Case("cross_entropy_fwd_bwd", 2 * work, run)


def decoding(s: Shapes) -> Iterator[Case]:
    rows = 32
    logits = s.array(rows, VOCABULARY)
    chosen, positions = (_C.array(np.zeros(rows), "int32", s.device) for _ in range(2))

    def greedy(t, a):
        places = t.zeros(rows, dtype=t.int32, device="cuda")
        return lambda: (t.argmax(a, 1), places.add_(1))

    run = functools.partial(_C.decode_greedy, logits, chosen, positions)
    theirs = s.torch(greedy, (rows, VOCABULARY))
    yield Case("decode_greedy", s.size * rows * VOCABULARY, run, theirs)


def optimizers(s: Shapes) -> Iterator[Case]:
    n = PARAMETERS
    p, g, m = (s.array(n, dtype="float32") for _ in range(3))
    v = _C.multiply(m, m)
    low = _C.empty((n,), s.dtype, s.device) if s.dtype != "float32" else None
    _, scale = _C.grad_norm(g, 1.0)

    def adamw(t, p, grad):
        parameter = t.nn.Parameter(p)
        parameter.grad = grad
        return t.optim.AdamW([parameter], fused=True).step

    theirs = s.torch(lambda t, a: lambda: t.linalg.vector_norm(a), (n,), dtype="float32")
    yield Case("grad_norm", 4 * n, lambda: _C.grad_norm(g, 1.0), theirs)
    run = functools.partial(_C.adamw, p, g, m, v, low, scale, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)
    work = (28 + (s.size if low is not None else 0)) * n
    yield Case("adamw", work, run, s.torch(adamw, (n,), (n,), dtype="float32"))


FAMILIES: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "copy": copies,
    "elementwise": elementwise,
    "reduce": reductions,
    "matmul": products,
    "layernorm": norms,
    "attention": attention,
    "dilated": dilated,
    "embedding": embeddings,
    "order": order,
    "cross_entropy": losses,
    "decode": decoding,
    "optimizer": optimizers,
}


def measure(case: Case, device, torch, samples: int) -> tuple[float, float | None]:
    """Median milliseconds of needle and, when there is one, of the baseline."""
    sides = {"needle": (case.run, bench.needle_timer(device))}
    if torch is not None and case.baseline is not None:
        sides["torch"] = case.baseline(torch), bench.torch_timer()

    def sampler(call: Call, timer: bench.Timer) -> Call:
        count = bench.repeats_for(SAMPLE_MS, timer, call, 200)
        return lambda: timer(call, count) / count

    samplers = {name: sampler(*side) for name, side in sides.items()}
    times = bench.in_turns(samplers, samples)
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    return medians["needle"], medians.get("torch")


def main() -> None:
    parser = bench.parser(
        __doc__,
        ("--batch-size", 16, "B", ""),
        ("--seq-len", 2048, "T", ""),
        ("--samples", 9, "N", "of each side"),
        ("--alone", bool, None, "time needle only"),
        ("--dtype", "bfloat16", None, "", *ITEM_SIZE),
        ("--only", [*FAMILIES], None, "", *FAMILIES),
    )
    args = parser.parse_args()

    bench.need_gpu()
    torch = None
    if not args.alone and bench.has("torch"):
        import torch as found

        if found.cuda.is_available():
            torch = found
    shapes = Shapes(args.batch_size, args.seq_len, args.dtype)
    print(bench.describe(shapes.device))
    print(
        f"Pythia-70M, B {args.batch_size}, T {args.seq_len}, {args.dtype}, median of "
        f"{args.samples}" + (f", interleaved with torch {torch.__version__}" if torch else "")
    )
    print(f"{'':32}{'ms':>10}{'GB/s':>10}{'TFLOP/s':>10}{'torch ms':>10}{'x torch':>9}")
    slow, alone = [], []
    for family in args.only:
        for case in FAMILIES[family](shapes):
            mine, other = measure(case, shapes.device, torch, args.samples)
            rate = case.work / (mine * 1e-3)
            gigabytes = "" if case.flops else f"{rate / 1e9:.0f}"
            teraflops = f"{rate / 1e12:.0f}" if case.flops else ""
            theirs = "" if other is None else f"{other:.4f}"
            ratio = "" if other is None else f"{other / mine:.2f}"
            cells = f"{mine:10.4f}{gigabytes:>10}{teraflops:>10}{theirs:>10}{ratio:>9}"
            print(f"{case.name:32}{cells}", flush=True)
            if other is None:
                alone.append(case.name)
            elif other < SLOW * mine:
                slow.append(f"{case.name} ({ratio})")
        if torch is not None:
            torch.cuda.empty_cache()
        shapes.device.empty_cache()
    if torch is not None:
        print(f"below {SLOW} of PyTorch's speed: {', '.join(slow) or 'none'}")
        print(f"no one call in PyTorch: {', '.join(alone) or 'none'}")
    for op, why in LEFT_OUT.items():
        print(f"not here: {op}: {why}")


if __name__ == "__main__":
    bench.run(main)
