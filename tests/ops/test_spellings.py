"""Ordinary spellings of PyTorch, NumPy and the course, as they are typed on the first day."""

import numpy as np
from harness import naming

import needle as ndl
from needle import nn
from needle import ops as F

SPELLINGS = """
ndl.abs(x) ; x.abs() ; abs(x) ; ndl.absolute(x) ; ndl.sign(x) ; x.floor() ; ndl.ceil(x)
x.round() ; ndl.clip(x, 0, 1) ; x.clip(0, 1) ; x.clamp(min=0) ; ndl.clamp(x, max=1)
ndl.maximum(x, y) ; ndl.minimum(x, 0) ; x.maximum(y) ; ndl.sin(x) ; x.cos() ; ndl.erf(x)
F.softplus(x) ; F.silu(x) ; ndl.log1p(p) ; x.expm1() ; p.rsqrt() ; x.square() ; ndl.isnan(x)
x.isfinite() ; x.tanh() ; x.sigmoid() ; x.relu() ; x.exp() ; p.log() ; p.sqrt() ; ndl.exp(x)
ndl.tanh(x) ; F.gelu(x) ; b & b ; b | ~b ; ~b ; i & 1 ; 1 | i ; i ^ i ; i % 3 ; 7 % i ; i // 2
x % 2 ; x // 2 ; 5 // p ; x ** 2 ; 2 ** x ; x / y ; x - 1 ; -x ; (x > 0) & (x < 1) ; x[x > 0]
x == y ; x != y ; x.any() ; x.all() ; ndl.any(x, axis=0) ; ndl.all(b, 1) ; x.min() ; x.min(dim=1)
x.max(axis=0) ; x.var() ; x.std(dim=-1, keepdim=True) ; ndl.var(x, axis=0, ddof=1) ; x.norm()
ndl.norm(x, 1) ; x.prod() ; ndl.prod(x, axis=1) ; x.sum(0) ; x.sum(dim=1, keepdim=True)
ndl.sum(x, axis=-1) ; x.mean(1, keepdims=True) ; ndl.mean(x, dim=0) ; x.argmax(dim=-1)
x.argmin(1) ; ndl.argmax(x) ; F.softmax(x, dim=-1) ; x.softmax(-1) ; F.log_softmax(x, dim=1)
x.logsumexp(1) ; ndl.gather(x, 1, i) ; x.gather(1, i) ; ndl.take_along_axis(x, i, axis=1)
x.scatter_add(1, i, y) ; x.index_select(0, [1, 0]) ; x.index_add(0, [1], y[:1]) ; ndl.nonzero(x)
x.nonzero() ; x.squeeze() ; x.unsqueeze(0) ; ndl.squeeze(x[None], 0) ; x.view(-1) ; x.view(2, 6)
x.flatten() ; x.flatten(0, 1) ; ndl.tile(x, (2, 1)) ; x.tile(2) ; x.repeat(2, axis=0)
x.repeat_interleave(2) ; x.chunk(2, dim=1) ; ndl.chunk(x, 2) ; ndl.roll(x, 1, axis=1) ; x.roll(1)
ndl.pad(x, ((1, 1), (0, 2))) ; x.tril() ; ndl.triu(x, 1) ; x.T ; x.transpose() ; x.transpose(0, 1)
x.permute(1, 0) ; x.reshape(2, -1) ; ndl.cat([x, y], dim=1) ; ndl.concatenate([x, y], axis=0)
ndl.stack([x, y], axis=1) ; ndl.expand_dims(x, 0) ; ndl.flip(x, 0) ; x.broadcast_to((2, 3, 4))
ndl.where(x > 0, x, 0) ; ndl.eye(3) ; ndl.linspace(0, 1, 5) ; ndl.randint(0, 10, (2, 3))
ndl.randperm(5) ; ndl.full((2, 2), 7) ; ndl.multinomial(p, 3) ; ndl.zeros(2, 3) ; ndl.ones(2)
ndl.arange(10) ; ndl.randn(3, 4) ; ndl.zeros_like(x) ; ndl.einsum("ij,kj->ik", x, y)
ndl.outer(x[0], y[0]) ; ndl.dot(x[0], y[0]) ; x @ v ; v @ x.T ; ndl.matmul(x, v) ; v @ v
x.matmul(y.T) ; x.dot(v) ; x.detach().numpy() ; x.tolist() ; x.clone() ; x.float() ; x.half()
i.long() ; x.sum().item() ; b.int() ; x.to("cpu") ; x.cpu() ; x.to("float16") ; x.astype("int32")
x.contiguous() ; x.is_contiguous() ; ndl.autograd.grad(x.sum(), x) ; len(x) ; float(x.sum())
x.shape ; x.ndim ; x.size ; x.dtype ; F.mse_loss(x, y) ; F.l1_loss(x, y)
F.binary_cross_entropy_with_logits(x, p) ; F.dropout(x, 0.5) ; F.binary_cross_entropy(p, p)
F.kl_div(F.log_softmax(x), p, reduction="batchmean") ; nn.MSELoss()(x, y)
nn.BCEWithLogitsLoss()(x, p) ; nn.L1Loss()(x, y) ; nn.KLDivLoss()(x, p) ; nn.RMSNorm(4)(x)
nn.SiLU()(x) ; nn.Tanh()(x) ; nn.Sigmoid()(x) ; nn.SwiGLU(4, 8)(x)
ndl.optim.SGD([nn.Parameter(x)]).zero_grad() ; ndl.summation(x, axes=1) ; ndl.power_scalar(x, 2)
a & 1 ; ~a ; a % 2 ; a // 2 ; a.index_select(0, [0]) ; a.contiguous() ; a.is_contiguous()
ndl.zeros((2, 3)) ; ndl.ones([2, 3]) ; ndl.randn((2, 3)) ; ndl.tensor([1, 2]) ; x.numel() ; x.dim()
x.t() ; v.expand(2, -1) ; x.masked_fill(x > 0, 0) ; ndl.manual_seed(0)
c @ c[0].flat ; ndl.cumsum(x, 0) ; ndl.sort(x) ; x.argsort() ; ndl.topk(x, 2) ; ndl.unique(i)
x.sort(dim=0) ; ndl.argsort(x, axis=0, descending=True) ; x.topk(2, dim=0) ; x.cumsum(dim=1)
"""


def test_spellings_of_the_first_day():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 4)).astype(np.float32)
    names = {
        "ndl": ndl,
        "nn": nn,
        "F": F,
        "x": ndl.Tensor(values),
        "y": ndl.Tensor(values[::-1]),
        "p": ndl.Tensor(np.abs(values) / 9 + 0.1),
        "v": ndl.Tensor(values[0]),
        "b": ndl.Tensor(values > 0, dtype="bool"),
        "i": ndl.Tensor(rng.integers(1, 4, (3, 4)), dtype="int64", requires_grad=False),
        "c": ndl.NDArray(values),
        "a": ndl.NDArray(np.arange(4, dtype=np.int32).reshape(2, 2), dtype="int32"),
    }
    spellings = [text.strip() for line in SPELLINGS.split("\n") for text in line.split(" ; ")]
    spellings = [text for text in spellings if text]
    assert len(spellings) >= 150
    for text in spellings:
        with naming(text):
            eval(text, dict(names))
