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

import argparse
import dataclasses
import functools
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()
from needle import _C
from needle.processes import program

C, HEADS, HEAD_DIM, VOCABULARY, PARAMETERS = 512, 8, 64, 50304, 70_426_624
ROTARY = 8  # angles: the first 16 of 64 dims turn
SAMPLE_MS = 5.0  # a sample repeats the operation about so long
SLOW = 0.9  # of PyTorch's speed
LEFT_OUT = {
    "block_sparse_attention_fwd": "beside dense attention in benchmarks/attention.py",
    "block_sparse_attention_bwd": "beside dense attention in benchmarks/attention.py",
    "block_lists": "once a mask",
    "decode_attention": "several calls in PyTorch; whole steps in benchmarks/generate.py",
}
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass
class Case:
    """One row of the table. `work` is in bytes, or in operations when `flops`."""

    name: str
    work: float
    run: Callable[[], Any]
    peer: Callable[[Any], Callable[[], Any]] | None = None  # given the torch module
    flops: bool = False


class Shapes:
    def __init__(self, batch: int, time: int, dtype: str) -> None:
        self.batch, self.time, self.rows, self.dtype = batch, time, batch * time, dtype
        self.size = ITEM_SIZE[dtype]
        self.device = _C.cuda()
        self.random = np.random.default_rng(0)

    def array(self, *shape: int, dtype: str | None = None, scale: float = 1.0):
        """Random numbers of a normal distribution; made small and repeated when very large."""
        count = int(np.prod(shape))
        piece = min(count, 1 << 24)
        values = _C.array(
            self.random.standard_normal(piece, dtype=np.float32) * scale,
            dtype=dtype or self.dtype,
            device=self.device,
        )
        out = _C.empty((count,), dtype or self.dtype, self.device)
        for start in range(0, count, piece):
            n = min(piece, count - start)
            out[start : start + n] = values[:n]
        return out.reshape(shape)

    def ids(self, high: int):
        """Token ids distributed as in text: the k-th most frequent comes about 1/k as often."""
        drawn = np.minimum(self.random.zipf(1.1, self.rows) - 1, high - 1)
        return _C.array(drawn.astype(np.int32), dtype="int32", device=self.device)

    def tensor(self, torch, *shape: int, dtype: str | None = None):
        out = torch.empty(shape, dtype=getattr(torch, dtype or self.dtype), device="cuda")
        return out.normal_()


def copies(s: Shapes) -> Iterator[Case]:
    n, size = s.rows * 4 * C, s.size
    x, wide = s.array(s.rows, 4 * C), s.array(s.rows, 4 * C, dtype="float32")
    narrow = _C.empty((s.rows, 4 * C), s.dtype, s.device)
    heads = s.array(s.batch, s.time, HEADS, HEAD_DIM)
    turned = _C.empty((s.batch, HEADS, s.time, HEAD_DIM), s.dtype, s.device)

    def copy_peer(torch):
        a = s.tensor(torch, s.rows, 4 * C)
        b = torch.empty_like(a)
        return lambda: b.copy_(a)

    def cast_peer(torch):
        a = s.tensor(torch, s.rows, 4 * C, dtype="float32")
        b = torch.empty(a.shape, dtype=getattr(torch, s.dtype), device="cuda")
        return lambda: b.copy_(a)

    def turn_peer(torch):
        a = s.tensor(torch, s.batch, s.time, HEADS, HEAD_DIM)
        return lambda: a.transpose(1, 2).contiguous()

    yield Case("assign", 2 * size * n, lambda: _C.assign(narrow, x), copy_peer)
    yield Case(
        "fill",
        size * n,
        lambda: _C.fill(narrow, 1.0),
        lambda t: functools.partial(s.tensor(t, s.rows, 4 * C).fill_, 1.0),
    )
    yield Case("assign float32 ->", (4 + size) * n, lambda: _C.assign(narrow, wide), cast_peer)
    yield Case(
        "assign (B,T,H,D) -> (B,H,T,D)",
        2 * size * s.rows * C,
        lambda: _C.assign(turned, heads.permute((0, 2, 1, 3))),
        turn_peer,
    )


# op -> the same in PyTorch, given the torch module, two matrices and a row
UNARY = {
    "negate": lambda t, a, b, c: t.neg(a),
    "absolute": lambda t, a, b, c: t.abs(a),
    "relu": lambda t, a, b, c: t.relu(a),
    "exp": lambda t, a, b, c: t.exp(a),
    "log": lambda t, a, b, c: t.log(a),
    "sqrt": lambda t, a, b, c: t.sqrt(a),
    "tanh": lambda t, a, b, c: t.tanh(a),
    "sigmoid": lambda t, a, b, c: t.sigmoid(a),
    "gelu": lambda t, a, b, c: t.nn.functional.gelu(a),
    "gelu_tanh": lambda t, a, b, c: t.nn.functional.gelu(a, approximate="tanh"),
}
BINARY = {
    "add": lambda t, a, b, c: t.add(a, b),
    "subtract": lambda t, a, b, c: t.sub(a, b),
    "multiply": lambda t, a, b, c: t.mul(a, b),
    "divide": lambda t, a, b, c: t.div(a, b),
    "power": lambda t, a, b, c: t.pow(a, b),
    "maximum": lambda t, a, b, c: t.maximum(a, b),
    "minimum": lambda t, a, b, c: t.minimum(a, b),
    "gelu_bwd": lambda t, a, b, c: t.ops.aten.gelu_backward(b, a),
    "gelu_tanh_bwd": lambda t, a, b, c: t.ops.aten.gelu_backward(b, a, approximate="tanh"),
}
COMPARISONS = {
    "equal": lambda t, a, b, c: t.eq(a, b),
    "not_equal": lambda t, a, b, c: t.ne(a, b),
    "less": lambda t, a, b, c: t.lt(a, b),
    "less_equal": lambda t, a, b, c: t.le(a, b),
    "greater": lambda t, a, b, c: t.gt(a, b),
    "greater_equal": lambda t, a, b, c: t.ge(a, b),
}


def elementwise(s: Shapes) -> Iterator[Case]:
    n, size = s.rows * 4 * C, s.size
    x, y, row = s.array(s.rows, 4 * C), s.array(s.rows, 4 * C), s.array(4 * C)

    def peer(call):
        def make(torch):
            a, b = (s.tensor(torch, s.rows, 4 * C) for _ in range(2))
            c = s.tensor(torch, 4 * C)
            return lambda: call(torch, a, b, c)

        return make

    for op, call in UNARY.items():
        yield Case(op, 2 * size * n, functools.partial(getattr(_C, op), x), peer(call))
    for op, call in BINARY.items():
        yield Case(op, 3 * size * n, functools.partial(getattr(_C, op), x, y), peer(call))
    for op, call in COMPARISONS.items():
        work = (2 * size + 1) * n
        yield Case(op, work, functools.partial(getattr(_C, op), x, y), peer(call))
    yield Case("add a row", 2 * size * n, lambda: _C.add(x, row), peer(lambda t, a, b, c: a + c))


def reductions(s: Shapes) -> Iterator[Case]:
    work = s.size * s.rows * 4 * C
    x = s.array(s.rows, 4 * C)
    columns, short = x.permute((1, 0)), x.reshape((4 * s.rows, C))

    def peer(call):
        def make(torch):
            a = s.tensor(torch, s.rows, 4 * C)
            return lambda: call(torch, a)

        return make

    def short_peer(torch):
        a = s.tensor(torch, 4 * s.rows, C)
        return lambda: a.sum(1)

    peers = {
        "sum": lambda t, a, axis: t.sum(a, axis),
        "sumsq": lambda t, a, axis: t.linalg.vector_norm(a, dim=axis),  # and a root an output
        "max": lambda t, a, axis: t.amax(a, axis),
        "min": lambda t, a, axis: t.amin(a, axis),
        "argmax": lambda t, a, axis: t.argmax(a, axis),
        "argmin": lambda t, a, axis: t.argmin(a, axis),
    }
    for op, call in peers.items():
        f = getattr(_C, op)
        for name, array, axis in (("rows", x, 1), ("columns", columns, 0)):
            yield Case(
                f"{op} of {name}",
                work,
                functools.partial(f, array, 1),
                peer(functools.partial(call, axis=axis)),
            )
    yield Case("sum of rows of 512", work, lambda: _C.sum(short, 1), short_peer)
    yield Case("sum of all", work, lambda: _C.sum(x, 2), peer(lambda t, a: t.sum(a)))


def products(s: Shapes) -> Iterator[Case]:
    rows = s.rows
    for k, m in ((C, 3 * C), (C, 4 * C), (4 * C, C), (C, VOCABULARY)):
        x, w, b = s.array(rows, k), s.array(k, m, scale=0.02), s.array(m)
        dy, dw = s.array(rows, m), s.array(1, k, m, dtype="float32")
        x3, w3, dy3 = x.reshape((1, rows, k)), w.reshape((1, k, m)), dy.reshape((1, rows, m))
        w_t, x_t = w3.permute((0, 2, 1)), x3.permute((0, 2, 1))
        bias = b if m != VOCABULARY else None
        work = 2.0 * rows * k * m

        def forward_peer(torch, k=k, m=m, with_bias=bias is not None):
            a, v = s.tensor(torch, rows, k), s.tensor(torch, m, k)
            c = s.tensor(torch, m) if with_bias else None
            return lambda: torch.nn.functional.linear(a, v, c)

        def dx_peer(torch, k=k, m=m):
            d, v = s.tensor(torch, rows, m), s.tensor(torch, m, k)
            return lambda: d @ v

        def dw_peer(torch, k=k, m=m):
            d, a = s.tensor(torch, rows, m), s.tensor(torch, rows, k)
            return lambda: d.t() @ a

        yield Case(
            f"linear_fwd {k} -> {m}",
            work,
            lambda x=x, w=w, bias=bias: _C.linear_fwd(x, w, bias, None),
            forward_peer,
            flops=True,
        )
        yield Case(
            f"matmul dx {k} -> {m}",
            work,
            lambda dy3=dy3, w_t=w_t: _C.matmul(dy3, w_t, None),
            dx_peer,
            flops=True,
        )
        yield Case(
            f"matmul_acc dw {k} -> {m}",
            work,
            lambda x_t=x_t, dy3=dy3, dw=dw: _C.matmul_acc(x_t, dy3, None, 1, dw),
            dw_peer,
            flops=True,
        )
    x, w, b, slope = (
        s.array(rows, C),
        s.array(C, 4 * C, scale=0.02),
        s.array(4 * C),
        s.array(rows, 4 * C),
    )
    w_back, db = s.array(4 * C, C, scale=0.02), s.array(4 * C, dtype="float32")
    work = 2.0 * rows * C * 4 * C

    def gelu_peer(torch):
        a, v, c = s.tensor(torch, rows, C), s.tensor(torch, 4 * C, C), s.tensor(torch, 4 * C)
        f = torch.nn.functional
        return lambda: f.gelu(f.linear(a, v, c), approximate="tanh")

    def gelu_bwd_peer(torch):
        d, v, p = s.tensor(torch, rows, C), s.tensor(torch, C, 4 * C), s.tensor(torch, rows, 4 * C)
        return lambda: ((d @ v) * p).sum(0)

    for form, tanh in (("erf", 0), ("tanh", 1)):
        yield Case(
            f"linear_gelu_fwd {form}",
            work,
            functools.partial(_C.linear_gelu_fwd, x, w, b, tanh, s.array(rows, 4 * C)),
            gelu_peer,
            flops=True,
        )
    yield Case(
        "linear_gelu_bwd",
        work,
        functools.partial(_C.linear_gelu_bwd, x, w_back, slope, db),
        gelu_bwd_peer,
        flops=True,
    )
    for m in (C, 3 * C, 4 * C):
        dy, db = s.array(rows, m), s.array(m, dtype="float32")

        def sum_peer(torch, m=m):
            d = s.tensor(torch, rows, m)
            return lambda: d.sum(0)

        yield Case(
            f"bias_bwd {m}",
            s.size * rows * m,
            lambda dy=dy, db=db: _C.bias_bwd(dy, db, None),
            sum_peer,
        )


def norms(s: Shapes) -> Iterator[Case]:
    n, size = s.rows * C, s.size
    x, dy, w, b = s.array(s.rows, C), s.array(s.rows, C), s.array(C), s.array(C)
    dw, db = s.array(C, dtype="float32"), s.array(C, dtype="float32")
    _, mean, rstd = _C.layernorm_fwd(x, w, b, 1e-5)

    def forward_peer(torch):
        a, v, c = s.tensor(torch, s.rows, C), s.tensor(torch, C), s.tensor(torch, C)
        return lambda: torch.nn.functional.layer_norm(a, (C,), v, c)

    def backward_peer(torch):
        a, v, c = s.tensor(torch, s.rows, C), s.tensor(torch, C), s.tensor(torch, C)
        d = s.tensor(torch, s.rows, C)
        _, m, r = torch.native_layer_norm(a, (C,), v, c, 1e-5)
        wanted = [True, True, True]
        return lambda: torch.ops.aten.native_layer_norm_backward(d, a, (C,), m, r, v, c, wanted)

    yield Case("layernorm_fwd", 2 * size * n, lambda: _C.layernorm_fwd(x, w, b, 1e-5), forward_peer)
    yield Case(
        "layernorm_bwd",
        3 * size * n,
        lambda: _C.layernorm_bwd(dy, x, w, mean, rstd, None, dw, db),
        backward_peer,
    )

    dy2, dres, w2, b2 = s.array(s.rows, C), s.array(s.rows, C), s.array(C), s.array(C)
    dw2, db2 = s.array(C, dtype="float32"), s.array(C, dtype="float32")
    yield Case(
        "layernorm_pair_fwd", 3 * size * n, lambda: _C.layernorm_pair_fwd(x, w, b, w2, b2, 1e-5)
    )
    yield Case(
        "layernorm_pair_bwd",
        5 * size * n,
        lambda: _C.layernorm_pair_bwd(dy, dy2, x, w, w2, mean, rstd, dres, dw, db, dw2, db2),
    )


def attention(s: Shapes) -> Iterator[Case]:
    qkv = s.array(s.batch, s.time, HEADS, 3, HEAD_DIM)
    cos, sin = s.array(s.time, ROTARY, dtype="float32"), s.array(s.time, ROTARY, dtype="float32")
    q, k, v = (
        qkv[:, :, :, i : i + 1].reshape((s.batch, s.time, HEADS, HEAD_DIM)) for i in range(3)
    )
    scale = HEAD_DIM**-0.5
    o, dq, dk, dv = (_C.empty(q.shape, s.dtype, s.device) for _ in range(4))
    lse = _C.attention_fwd(q, k, v, scale, 1, o)
    work = 2.0 * 2 * s.batch * HEADS * s.time * s.time * HEAD_DIM / 2

    def inputs(torch):
        return (s.tensor(torch, s.batch, HEADS, s.time, HEAD_DIM).requires_grad_() for _ in "qkv")

    def forward_peer(torch):
        a, b, c = (x.detach() for x in inputs(torch))
        return lambda: torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)

    def backward_peer(torch):
        a, b, c = inputs(torch)
        out = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)
        d = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (a, b, c), d, retain_graph=True)

    turned = qkv.size * 2 // 3 * 2 * ROTARY // HEAD_DIM  # of q and k
    yield Case("rotary", 2 * s.size * turned, lambda: _C.rotary(qkv, cos, sin, 2, 1.0))
    x, w = s.array(s.batch, s.time, C), s.array(C, HEADS, 3, HEAD_DIM, scale=0.02)
    b = s.array(HEADS, 3, HEAD_DIM)

    def projection_peer(torch):
        a, v, e = (
            s.tensor(torch, *shape) for shape in ((s.batch, s.time, C), (3 * C, C), (3 * C,))
        )
        angle = torch.rand(s.time, 1, 1, ROTARY, device="cuda")
        c, d = angle.cos().to(a.dtype), angle.sin().to(a.dtype)

        def run():
            y = torch.nn.functional.linear(a, v, e).view(s.batch, s.time, HEADS, 3, HEAD_DIM)
            first, second = y[..., :2, : 2 * ROTARY].split(ROTARY, -1)
            both = first * c - second * d, second * c + first * d
            y[..., :2, : 2 * ROTARY] = torch.cat(both, -1)
            return y

        return run

    yield Case(
        "linear_rotary_fwd",
        2.0 * s.rows * C * 3 * C,
        lambda: _C.linear_rotary_fwd(x, w, b, cos, sin, 2),
        projection_peer,
        flops=True,
    )
    yield Case(
        "attention_fwd",
        work,
        lambda: _C.attention_fwd(q, k, v, scale, 1, o),
        forward_peer,
        flops=True,
    )
    yield Case(
        "attention_bwd",
        2.5 * work,
        lambda: _C.attention_bwd(o, q, k, v, o, lse, scale, 1, None, None, dq, dk, dv, None),
        backward_peer,
        flops=True,
    )


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
    yield Case(
        "dilated_merge",
        work + (held + 1) * rows * 4,
        lambda: _C.dilated_merge(parts, lse, segments, dilations),
    )


def embeddings(s: Shapes) -> Iterator[Case]:
    ids, w, dy = s.ids(VOCABULARY), s.array(VOCABULARY, C), s.array(s.rows, C)
    dw = s.array(VOCABULARY, C, dtype="float32")
    drawn = ids.numpy()
    unique = len(np.unique(drawn))

    def forward_peer(torch):
        i = torch.from_numpy(drawn.astype(np.int64)).cuda()
        v = s.tensor(torch, VOCABULARY, C)
        return lambda: torch.nn.functional.embedding(i, v)

    def backward_peer(torch):
        i = torch.from_numpy(drawn.astype(np.int64)).cuda()
        d = s.tensor(torch, s.rows, C)
        return lambda: torch.ops.aten.embedding_dense_backward(d, i, VOCABULARY, -1, False)

    yield Case(
        "embedding_fwd", 2 * s.size * s.rows * C, lambda: _C.embedding_fwd(ids, w), forward_peer
    )
    yield Case(
        "embedding_bwd",
        s.size * s.rows * C + 8 * unique * C,
        lambda: _C.embedding_bwd(ids, dy, dw),
        backward_peer,
    )


def losses(s: Shapes) -> Iterator[Case]:
    logits, targets = s.array(s.rows, VOCABULARY), s.ids(VOCABULARY)
    _, lse, _, count = _C.cross_entropy_fwd(logits, targets)
    dloss = _C.array(1.0, dtype="float32", device=s.device)
    n = s.rows * VOCABULARY
    drawn = targets.numpy()

    def forward_peer(torch):
        a = s.tensor(torch, s.rows, VOCABULARY)
        t = torch.from_numpy(drawn.astype(np.int64)).cuda()
        return lambda: torch.nn.functional.cross_entropy(a, t)

    def backward_peer(torch):
        a = s.tensor(torch, s.rows, VOCABULARY).requires_grad_()
        t = torch.from_numpy(drawn.astype(np.int64)).cuda()
        loss = torch.nn.functional.cross_entropy(a, t)
        return lambda: torch.autograd.grad(loss, a, retain_graph=True)

    yield Case(
        "cross_entropy_fwd", s.size * n, lambda: _C.cross_entropy_fwd(logits, targets), forward_peer
    )
    yield Case(
        "cross_entropy_bwd",
        2 * s.size * n,
        lambda: _C.cross_entropy_bwd(logits, targets, lse, count, dloss),
        backward_peer,
    )
    rows = _C.array(logits, s.dtype, s.device)  # run again and again, it works on what it left
    yield Case(
        "cross_entropy_fwd_bwd", 2 * s.size * n, lambda: _C.cross_entropy_fwd_bwd(rows, targets)
    )


def decoding(s: Shapes) -> Iterator[Case]:
    rows = 32
    logits = s.array(rows, VOCABULARY)
    tokens, positions = (_C.array(np.zeros(rows), "int32", s.device) for _ in range(2))

    def peer(torch):
        a = s.tensor(torch, rows, VOCABULARY)
        places = torch.zeros(rows, dtype=torch.int32, device="cuda")
        return lambda: (torch.argmax(a, 1), places.add_(1))

    yield Case(
        "decode_greedy",
        s.size * rows * VOCABULARY,
        lambda: _C.decode_greedy(logits, tokens, positions),
        peer,
    )


def optimizers(s: Shapes) -> Iterator[Case]:
    n = PARAMETERS
    p, g, m = (s.array(n, dtype="float32") for _ in range(3))
    v = _C.multiply(m, m)
    low = _C.empty((n,), s.dtype, s.device) if s.dtype != "float32" else None
    _, scale = _C.grad_norm(g, 1.0)

    def norm_peer(torch):
        a = s.tensor(torch, n, dtype="float32")
        return lambda: torch.linalg.vector_norm(a)

    def adamw_peer(torch):
        parameter = torch.nn.Parameter(s.tensor(torch, n, dtype="float32"))
        parameter.grad = s.tensor(torch, n, dtype="float32")
        optimizer = torch.optim.AdamW([parameter], fused=True)
        return optimizer.step

    yield Case("grad_norm", 4 * n, lambda: _C.grad_norm(g, 1.0), norm_peer)
    yield Case(
        "adamw",
        (28 + (s.size if low is not None else 0)) * n,
        lambda: _C.adamw(p, g, m, v, low, scale, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1),
        adamw_peer,
    )


FAMILIES: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "copy": copies,
    "elementwise": elementwise,
    "reduce": reductions,
    "matmul": products,
    "layernorm": norms,
    "attention": attention,
    "dilated": dilated,
    "embedding": embeddings,
    "cross_entropy": losses,
    "decode": decoding,
    "optimizer": optimizers,
}


def needle_sample(device, run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds an operation, over `repeats` of them."""
    start, end = _C.Event(device), _C.Event(device)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    device.synchronize()
    return start.elapsed(end) / repeats


def torch_sample(torch, run: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def repeats_for(sample: Callable[[int], float]) -> int:
    sample(2)
    return max(1, min(200, round(SAMPLE_MS / max(sample(2), 1e-3))))


def measure(case: Case, device, torch, samples: int) -> tuple[float, float | None]:
    """Median milliseconds of needle and, when there is one, of the peer; samples alternate."""

    def mine(repeats: int) -> float:
        return needle_sample(device, case.run, repeats)

    sides = [mine]
    if torch is not None and case.peer is not None:
        peer = case.peer(torch)
        sides.append(lambda repeats: torch_sample(torch, peer, repeats))
    counts = [repeats_for(side) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(samples):
        for side, count, seen in zip(sides, counts, times):
            seen.append(side(count))
    medians = [statistics.median(seen) for seen in times]
    return medians[0], medians[1] if len(medians) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(ITEM_SIZE))
    parser.add_argument("--samples", type=int, default=9, help="samples of each side")
    parser.add_argument("--only", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument("--alone", action="store_true", help="time needle only")
    args = parser.parse_args()

    _C.cuda_init()
    torch = None
    if not args.alone and importlib.util.find_spec("torch"):
        import torch as found

        if found.cuda.is_available():
            torch = found
    shapes = Shapes(args.batch_size, args.seq_len, args.dtype)
    properties = shapes.device.properties()
    print(f"{properties['name']}, {properties['detail']}")
    print(
        f"Pythia-70M, B {args.batch_size}, T {args.seq_len}, {args.dtype}, median of "
        f"{args.samples}" + (f", interleaved with torch {torch.__version__}" if torch else "")
    )
    print(f"{'':32}{'ms':>10}{'GB/s':>10}{'TFLOP/s':>10}{'torch ms':>10}{'x torch':>9}")
    slow, alone = [], []
    for family in args.only:
        for case in FAMILIES[family](shapes):
            mine, peer = measure(case, shapes.device, torch, args.samples)
            rate = case.work / (mine * 1e-3)
            gigabytes = "" if case.flops else f"{rate / 1e9:.0f}"
            teraflops = f"{rate / 1e12:.0f}" if case.flops else ""
            theirs = "" if peer is None else f"{peer:.4f}"
            ratio = "" if peer is None else f"{peer / mine:.2f}"
            print(
                f"{case.name:32}{mine:10.4f}{gigabytes:>10}{teraflops:>10}{theirs:>10}{ratio:>9}",
                flush=True,
            )
            if peer is None:
                alone.append(case.name)
            elif peer < SLOW * mine:
                slow.append(f"{case.name} ({peer / mine:.2f})")
        if torch is not None:
            torch.cuda.empty_cache()
        shapes.device.empty_cache()
    if torch is not None:
        print(f"below {SLOW} of PyTorch's speed: {', '.join(slow) or 'none'}")
        print(f"no one call in PyTorch: {', '.join(alone) or 'none'}")
    for op, why in LEFT_OUT.items():
        print(f"not here: {op}: {why}")


if __name__ == "__main__":
    sys.exit(program(main))
