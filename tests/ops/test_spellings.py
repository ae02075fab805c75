"""Ordinary spellings of PyTorch, NumPy and the course, as they are typed on the first day."""

import re

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import nn
from needle import ops as F
from needle.ops import instead
from needle.ops.spellings import SPELLINGS as TABLE

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
(x * 1).sub_(1) ; x.detach().clone().clamp_(min=0).zero_() ; ndl.nn.functional.relu(x)
ndl.empty(2)
nn.LayerNorm(4)(x) ; nn.CrossEntropyLoss()(x, [0, 1, 3]) ; nn.ModuleList([nn.ReLU()])[0](x)
ndl.randn_like(x) ; ndl.rand_like(x) ; ndl.inf > ndl.pi ; x.to(dtype=ndl.float16, device="cpu")
x.sort(dim=0) ; ndl.argsort(x, axis=0, descending=True) ; x.topk(2, dim=0) ; x.cumsum(dim=1)
"""

# as typed = the same in NumPy, of the same dtype and type
VALUES = """
x.pow(2) = x**2 ; ndl.pow(2, x) = 2**x ; ndl.add(x, 1) = x + 1 ; ndl.subtract(1, x) = 1 - x
x.mul(y).div(2) = x * y / 2 ; x.neg() = -x ; x.reciprocal() = 1 / x ; ndl.log2(p) = np.log2(p)
ndl.log10(p) = np.log10(p) ; ndl.round(x, 1) = np.round(x, 1) ; i.round(2) = i
ndl.isinf(x / 0) = np.ones((3, 4), bool) ; ndl.isinf(i) = i < 0 ; x.eq(y) = x == y
ndl.lt(x, 0) = x < 0 ; x.ge(y) = x >= y ; ndl.logical_and(x > 0, i) = np.logical_and(x > 0, i)
ndl.logical_or(b, x) = b | (x != 0) ; ndl.logical_not(x) = x == 0 ; x.allclose(x + 1e-7) = True
ndl.allclose(x, y) = False ; ndl.isclose(n, n) = np.isclose(n, n) ; x.amax(dim=1) = x.max(1)
ndl.amin(x, 0, keepdim=True) = x.min(0, keepdims=True)
x.var(dim=1, unbiased=True) = x.var(1, ddof=1)
x.norm(p=1, dim=1) = np.abs(x).sum(1) ; x.mm(y.t()) = x @ y.T ; ndl.mv(x, x[0]) = x @ x[0]
ndl.bmm(t, t.transpose(1, 2)) = t @ t.swapaxes(1, 2) ; ndl.transpose(t, 0, 2) = t.swapaxes(0, 2)
t.transpose(2, 0, 1) = t.transpose(2, 0, 1) ; ndl.swapaxes(t, 0, 1) = t.swapaxes(0, 1)
t.flatten(start_dim=1) = t.reshape(2, -1) ; x.ravel() = x.ravel()
ndl.concat([x, y], dim=1) = np.hstack([x, y])
x.split(3, dim=-1)[1] = x[:, 3:] ; x.split([1, 3], 1)[1] = x[:, 1:] ; x.unbind(1)[2] = x[:, 2]
ndl.triu(x, diagonal=1) = np.triu(x, 1) ; ndl.where(x > 0, 1.0, 0) = (x > 0).astype("f4")
ndl.where(b, 1, 0) = np.where(b, 1, 0)
ndl.linspace(0, 1, steps=3) = np.linspace(0, 1, 3).astype("f4")
ndl.zeros_like(x, dtype=ndl.int32) = np.zeros_like(x, "i4") ; +x = x ; ndl.empty_like(i) = 0 * i
ndl.ones_like(i, dtype=ndl.float32) = np.ones_like(i, "f4")
ndl.randn_like(i, dtype="float16").dtype = "float16"
ndl.full_like(x, 7, dtype="int64") = np.full_like(x, 7, "i8") ; ndl.zeros_like(b) = b & False
ndl.full_like(i, 7) = np.full_like(i, 7) ; ndl.tensor([[1, 2]]) = np.array([[1, 2]])
ndl.tensor(np.array([3, 1], "u2")) = np.array([3, 1]) ; ndl.tensor(np.uint8(3)) = np.int64(3)
ndl.tensor([True]) = np.array([True]) ; ndl.tensor(0.5) = np.float32(0.5)
x[ndl.tensor([2, 0])] = x[[2, 0]]
ndl.from_numpy(np.arange(3)) = np.arange(3) ; ndl.topk(x, 1, dim=0).values = x.max(0, keepdims=True)
ndl.topk(x, 1).indices[:, 0] = x.argmax(1) ; x.size = 12 ; x.size() = (3, 4) ; x.size(-1) = 4
x.numel() = 12 ; x.dtype == ndl.float32 = True ; ndl.zeros(2, dtype=ndl.int64) = np.zeros(2, "i8")
x[:, ndl.newaxis] = x[:, None] ; x.copy() = x ; x.clone().add_(y).mul_(2) = (x + y) * 2
x.clone().masked_fill_(x < 0, 0) = np.maximum(x, 0) ; x.clone().fill_(3) = np.full_like(x, 3)
b.scatter_add(1, i[:, :1], ~b) = b | (np.eye(4)[i[:, 0]] > 0) & ~b[:, :1]
ndl.hstack([x[0], y[0]]) = np.hstack([x[0], y[0]]) ; ndl.vstack([x, y]) = np.vstack([x, y])
ndl.vstack([x[0], y[0]]) = np.stack([x[0], y[0]]) ; t.movedim(0, -1) = np.moveaxis(t, 0, -1)
ndl.moveaxis(t, -1, 0) = np.moveaxis(t, -1, 0) ; x.where(b, 0) = np.where(b, x, 0)
x.view_as(x.T) = x.reshape(4, 3)
ndl.split(x, 3, dim=1)[1] = x[:, 3:] ; ndl.split(x, [1, 2], dim=0)[1] = x[1:]
ndl.split(x, dim=1)[3] = x[:, 3] ; ndl.split(x)[2] = x[2] ; ndl.unbind(x, -1)[0] = x[:, 0]
x.masked_select(b) = x[b] ; x[0].expand_as(y) = x[[0, 0, 0]] ; x.type_as(i) = x.astype("i8")
x.astype(int) = x.astype("i8") ; i.astype(float) = i.astype("f4") ; (x > 0).astype(bool) = x > 0
ndl.nn.Softmax(dim=0)(x) = np.exp(x) / np.exp(x).sum(0)
ndl.take_along_dim(x, i, 1) = np.take_along_axis(x, i, 1)
x[ndl.tensor(0) : ndl.tensor(2)] = x[:2] ; x[range(2)] = x[:2] ; x[range(0)] = x[:0]
len(range(ndl.tensor(3))) = 3
ndl.zeros(2, device=ndl.device("cpu")).requires_grad_().requires_grad = True
F.cross_entropy(x, r, reduction="none") = nll ; F.cross_entropy(x, r, reduction="sum") = nll.sum()
F.cross_entropy(x, [0, 9, 1], ignore_index=9) = nll[[0, 2]].mean()
F.one_hot(i) = np.eye(4, dtype="i8")[i]
F.cross_entropy(x, [0, -100, 1], "none") = nll * [1, 0, 1]
F.nll_loss(F.log_softmax(x), r) = nll.mean()
F.pad(x, (1, 0, 0, 2), value=5) = np.pad(x, ((0, 2), (1, 0)), constant_values=5)
F.linear(x, y, p[0, :3]) = x @ y.T + p[0, :3]
F.normalize(x) = x / np.linalg.norm(x, axis=1)[:, None]
F.cosine_similarity(x, y) = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
F.layer_norm(x, (4,), eps=0) = (x - x.mean(1)[:, None]) / x.std(1)[:, None]
F.scaled_dot_product_attention(q, q, q) = attended
x.max(dim=1).values = x.max(1) ; ndl.min(x, dim=0)[1] = x.argmin(0) ; ndl.max(x, y) = np.fmax(x, y)
x.max(dim=-1, keepdim=True).indices = x.argmax(1, keepdims=True) ; x.min(y) = np.minimum(x, y)
x.median() = np.median(x) ; ndl.median(i, 0) = np.median(i, 0) ; n.median() = np.median(n)
x.median(dim=1).values = np.sort(x)[:, 1] ; x.median(dim=0).indices = np.argsort(x, 0)[1]
x.median(axis=1, keepdims=True) = np.median(x, 1, keepdims=True)
x.cumprod(dim=1) = x.cumprod(1) ; ndl.cumprod(i, 0) = i.cumprod(0) ; t.cumprod() = t.cumprod()
ndl.var_mean(x, dim=1, unbiased=True)[0] = x.var(1, ddof=1) ; ndl.std_mean(x)[1] = x.mean()
x.scatter(1, i[:, :1], 2.0) = np.where(np.eye(4)[i[:, 0]] > 0, 2, x).astype("f4")
ndl.zeros(3, 4).scatter_(1, i[:, :1], value=1) = np.eye(4, dtype="f4")[i[:, 0]]
x.squeeze(dim=0) = x ; x[None].squeeze(dim=(0, 1)) = x ; x.mT = x.T ; ndl.trunc(x) = np.fix(x)
ndl.diag(x[0]) = np.diag(x[0]) ; ndl.diag(x, diagonal=-1) = np.diag(x, -1) ; x.trace() = x.trace()
ndl.diag(b[0], 1) = np.diag(b[0], 1) ; t.diagonal(1) = t.diagonal(1) ; ndl.tan(x) = np.tan(x)
ndl.meshgrid(x[0], i[:, 0])[1] = np.meshgrid(x[0], i[:, 0])[1]
ndl.meshgrid([r, r, x[0]], indexing="ij")[2] = np.meshgrid(r, r, x[0], indexing="ij")[2]
F.leaky_relu(x, 0.1) = np.fmax(x, x / 10) ; F.elu(x * 9) = np.where(x > 0, x * 9, np.expm1(x * 9))
nn.LeakyReLU(0.1)(x) = np.fmax(x, x / 10) ; nn.ELU(2)(x) = np.where(x > 0, x, 2 * np.expm1(x))
ndl.nan_to_num(n, posinf=5) = np.nan_to_num(n, posinf=5) ; (-n).nan_to_num() = np.nan_to_num(-n)
ndl.bincount(i.flatten(), minlength=9) = np.bincount(i.reshape(-1), None, 9)
ndl.lerp(x, y, 0.25) = x + (y - x) / 4 ; ndl.zeros(2, dtype=ndl.long) = np.zeros(2, int)
ndl.linalg.norm(x) = np.linalg.norm(x) ; ndl.linalg.norm(x, 1, dim=1) = np.linalg.norm(x, 1, 1)
ndl.tensordot(x, y, dims=2) = (x * y).sum() ; nn.ModuleDict({"a": nn.ELU()})["a"].alpha = 1.0
ndl.equal(x, x.clone()) = True ; ndl.equal(x, x.T) = False ; ndl.equal(x, y) = False
nn.Sequential(nn.ReLU()).train(False).modules[0].training = False
nn.ReLU().train(True).training = True ; nn.ReLU().zero_grad(set_to_none=True) = None
x.equal(x) = True ; ndl.equal(i, 1) = False ; ndl.equal(r, [0, 3, 1]) = True
ndl.norm(b, 0) = b.sum().astype("f4") ; ndl.norm(x, "fro") = np.linalg.norm(x)
ndl.linalg.norm(i, 0, axis=1) = np.linalg.norm(i, 0, axis=1) ; x.equal(0 * x) = False
t.diagonal(dim1=-2, dim2=-1) = t.diagonal(0, 1, 2) ; t.diagonal(1, 2, 0) = t.diagonal(1, 2, 0)
t.diagonal(offset=-1) = t.diagonal(-1) ; ndl.trace(t, offset=1, axis1=2) = t.trace(1, 2, 1)
ndl.tensordot(x, y[0], 0) = np.tensordot(x, y[0], 0)
ndl.count_nonzero(i) = np.count_nonzero(i) ; ndl.count_nonzero(b, dim=1) = b.sum(1)
nn.LogSoftmax(dim=0)(x) = x - np.log(np.exp(x).sum(0)) ; nn.Softplus()(x) = np.log1p(np.exp(x))
nn.Linear(4, 2).requires_grad_(False).weight.requires_grad = False
x.var(dim=1) = x.var(1, ddof=1) ; x.std(dim=0) = x.std(0, ddof=1) ; ndl.std(x, 0) = x.std(0)
ndl.var_mean(x, 1)[0] = x.var(1, ddof=1) ; x.sort(dim=1)[0] = np.sort(x) ; i.pow(3) = i**3
x.sort(dim=0, descending=True).indices = np.argsort(-x, 0) ; i**0 = i**0
(i + 2**40) ** 1 = i + 2**40 ; (i * 10**8) ** 2 = (i * 10**8) ** 2 ; i**-1.0 = i**-1.0
b**2 = b.astype("i4")
ndl.where(i > 1, i, 0.5) = np.where(i > 1, i, 0.5) ; ndl.where(b, b, False) = b
ndl.where(b, b, 2) = np.where(b, 1, 2).astype("i4") ; i.masked_fill(b, 0.5) = np.where(b, 0.5, i)
F.softmax(i, 1) = np.exp(i) / np.exp(i).sum(1)[:, None]
b.logsumexp(1) = np.log(np.exp(b + 0.0).sum(1))
F.log_softmax(i, 1) = i - np.log(np.exp(i).sum(1))[:, None]
ndl.tensordot(t, x, ([2], [1])) = np.tensordot(t, x, (2, 1))
ndl.bincount(r, weights=x[0, :3]) = np.bincount(r, x[0, :3])
0 in i = 0 in i ; 9 in i = False ; x[1] in x = True ; 2.0 in x = False ; "a" in x = False
3.0 in ndl.NDArray([[1, 3]]) = True ; 2 in ndl.NDArray([[1, 3]]) = False ; None in x = False
ndl.where(b)[1] = np.where(b)[1] ; ndl.where(i > 1)[0] = np.where(i > 1)[0]
x.type("int64") = x.astype("i8") ; x.to("cpu", "int64") = x.astype("i8")
ndl.as_tensor([1, 0.5]) = np.array([1, 0.5], "f4") ; x.is_cuda = False ; x.nbytes = 48
x.to("float16").nbytes = 24 ; ndl.is_grad_enabled() = True ; x.grad_fn = None
ndl.ones(2, requires_grad=True).sum().grad_fn is None = False
x.to(ndl.cpu(), dtype="int64") = x.astype("i8") ; nn.ParameterList([x])[0] = x
len(ndl.utils.data.TensorDataset(x, y)) = 3
len(ndl.utils.data.DataLoader(ndl.utils.data.TensorDataset(x), batch_size=2)) = 2
"""


def test_spellings_have_numpys_values():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    x, q = draw(3, 4), draw(1, 2, 3, 4)
    arrays = {"x": x, "y": draw(3, 4), "p": np.abs(draw(3, 4)) + 0.1, "t": draw(2, 3, 4), "q": q}
    arrays |= {"i": rng.integers(0, 4, (3, 4)), "b": x > 0, "r": np.array([0, 3, 1])}
    arrays["n"] = np.array([np.nan, np.inf, 1], np.float32)
    weights = np.exp(q @ q.swapaxes(2, 3) / 2)
    wanted = {
        "np": np,
        "nll": np.log(np.exp(x).sum(1)) - x[[0, 1, 2], [0, 3, 1]],
        "attended": weights / weights.sum(-1, keepdims=True) @ q,
    }
    tensors = {k: ndl.Tensor(a, dtype=a.dtype, requires_grad=False) for k, a in arrays.items()}
    names = {"ndl": ndl, "np": np, "nn": nn, "F": nn.functional, **tensors}
    for line in VALUES.strip().split("\n"):
        for text in line.split(" ; "):
            left, right = text.rsplit(" = ", 1)
            with naming(text), np.errstate(divide="ignore"):
                got, value = eval(left, dict(names)), eval(right, wanted | arrays)
                if not isinstance(got, ndl.Tensor):
                    assert got == value
                    continue
                np.testing.assert_allclose(got.numpy(), value, 1e-5, 1e-6)
                assert got.dtype == {"float64": "float32"}.get(str(value.dtype), str(value.dtype))


def test_absent_names_say_what_to_write_instead():
    """Names that stand in the hint are there, and those in the table are not."""
    owners = {"ndl": ndl, "nn": nn, "F": nn.functional, "optim": ndl.optim, "cuda": ndl.cuda}
    owners |= {"autograd": ndl.autograd, "x": ndl.ones(2), "net": nn.Sequential(nn.ReLU())}
    for text, hint in (
        ("net.register_forward_hook(print)", "model.hooks({name: function})"),
        ("net[0].register_full_backward_hook", "ndl.autograd.grad(loss, x)"),
        ("net.add_module('a', net)", "setattr(self, name, value)"), ("x.double()", "float32"),
        ("x.register_hook(print)", "ndl.autograd.grad"), ("x.retain_grad()", "ndl.autograd.grad"),
        ("ndl.compile(net)", "leave it out"),
        ("optim.lr_scheduler.StepLR", "optim.Cosine(lr, total=steps)"), ("nn.Conv2d", "left out"),
        ("F.conv2d(x, x)", "left out"), ("nn.MultiheadAttention(8, 2)", "nn.AttentionLayer"),
        ("autograd.Function", "ndl.autograd.TensorOp"), ("ndl.float64", "float32"),
        ("cuda.synchronize()", "ndl.cuda()"), ("ndl.backends.cudnn", "leave it out"),
        ("ndl.cuda.manual_seed_all(0)", "ndl.manual_seed"), ("nn.DataParallel(net)", "--gpus N"),
    ):  # fmt: skip
        with naming(text), pytest.raises(AttributeError, match=re.escape(hint)):
            eval(text, dict(owners))
    for name, hint in instead.HINTS.items():
        with naming(name):
            assert not any(hasattr(owner, name) for owner in owners.values())
            for said in re.findall(r"\b(?:ndl|nn|optim)(?:\.\w+)+", hint):
                eval(said, dict(owners))
    for text in ("ndl.zeroes", "nn.linear", "optim.Adamw", "x.zeroes", "net.zeroes"):
        with naming(text), pytest.raises(AttributeError, match="has no attribute '[a-zA-Z]*'$"):
            eval(text, dict(owners))

    class Net(nn.Module):
        def add_module(self, name):
            return name

    net = Net()
    net.register_hook, net.double = "own", 2
    assert (net.add_module("own"), net.register_hook, net.double) == ("own", "own", 2)


@pytest.mark.parity
def test_absent_names_are_pytorchs():
    torch = pytest.importorskip("torch")
    owners = torch, torch.nn, torch.nn.functional, torch.optim, torch.autograd, torch.cuda
    owners = (*owners, torch.Tensor, torch.nn.Module, torch.amp)
    for name in instead.HINTS:
        assert any(hasattr(owner, name) for owner in owners), name


def test_other_words_errors_say_what_is_wrong():
    x = ndl.ones(3, 4)
    for text, message in (
        ("x.split(0)", "size must be 1 or more"), ("x.split([1, 1], 1)", "do not sum to 4"),
        ("x.split([5, -1], 1)", "are below 0 or do not"), ("x[0].tril()", "tril: a must have 2"),
        ("x[0].triu()", "triu: a must have 2"), ("ndl.diag(x[None])", "diag: a must be a vector"),
        ("F.nll_loss(x, ndl.tensor([0, 1, -1]))", "number below 0"),
        ("x.repeat(2, 2)", "repeat: axis 2 does not exist"), ("F.pad(x, (1,))", "needs pairs"),
        ("F.pad(x, (1, 1), 'reflect')", "the mode 'constant'"),
        ("F.layer_norm(x, (3,))", "not .3,"),
        ("F.cross_entropy(x, [0, 1, 2], reduction='x')", "reduction must be"),
        ("ndl.linalg.norm(x, 2)", "ord 2 of 2 axes is no norm of vectors"),
        ("ndl.meshgrid(x, indexing='x')", "must be 'ij' or 'xy'"),
        ("ndl.diag(x.sum())", "diagonal: a must have 2 axes or more"),
        ("ndl.tensordot(x, x, ([0], [0, 1]))", "name 1 axes of a and 2 of b"),
        ("ndl.tensordot(x, x, ([0, 0], [0, 1]))", "an axis is named twice"),
        ("ndl.tensordot(x, x, -1)", "axes is -1, but a has 2 and b 2 axes"),
        ("ndl.tensordot(x, x, 3)", "axes is 3, but a has 2 and b 2 axes"),
        ("ndl.tensordot(x, x, ([0],))", "must be a number or"),
        ("x.diagonal(0, 1, -1)", "axis1 and axis2 are both 1"),
        ("ndl.bincount(ndl.tensor([1, -1]))", "bincount: a must be whole numbers from 0 on"),
        ("x.scatter(1, [[0, 1]], x[:, :1])", "scatter: src is .3, 1., too small"),
    ):  # fmt: skip
        with naming(text), pytest.raises(ValueError, match=message):
            eval(text, {"x": x, "F": nn.functional, "ndl": ndl})
    for text in ("ndl.index_select(x, 0, [True, False])", "F.embedding([True], x)"):
        with naming(text), pytest.raises(TypeError, match="must be whole numbers"):
            eval(text, {"x": x, "F": nn.functional, "ndl": ndl})
    for axis in (2, 7, -3):
        with naming(axis), pytest.raises(IndexError, match="index_select: axis"):
            x.cached_data.index_select(axis, [0])
    for text in (
        "ndl.tensor([300], dtype='uint8')", "ndl.tensor(np.int64(300), dtype='uint8')",
        "ndl.tensor([[0], [-1]], dtype='uint16')", "ndl.tensor([1e10], dtype='int32')",
        "ndl.Tensor([2**63], dtype='int64')", "i.__setitem__(0, [300])", "i.__setitem__(0, -1)",
        "i.cached_data.__setitem__(0, [300])", "i + 300", "i.cached_data + 300",
    ):  # fmt: skip
        with naming(text), pytest.raises(OverflowError):
            eval(text, {"ndl": ndl, "np": np, "i": ndl.tensor([1, 2], dtype="uint8")})
    for text in ("ndl.tensor([0, np.nan], dtype='int64')", "i.__setitem__(0, np.nan)"):
        with naming(text), pytest.raises(ValueError, match="NaN is no integer"):
            eval(text, {"ndl": ndl, "np": np, "i": ndl.tensor([1, 2])})
    for text in ("x.sum(True)", "x.max(dim=False)", "x.cached_data.sum(True)", "x.squeeze(True)"):
        with naming(text), pytest.raises(TypeError):
            eval(text, {"x": x})
    for text in (
        "x.max(0, dim=1)",
        "x.squeeze(0, dim=1)",
        "x.min(axes=0, axis=1)",
        "x.median(0, dim=1)",
    ):
        with naming(text), pytest.raises(TypeError, match="are the same: give one of them"):
            eval(text, {"x": x})
    for text in (
        "x.max(dim=(0, 1))", "x.median(dim=(0, 1))", "x.median((0, 1))", "x.sort(dim=(0, 1))",
        "x.cumsum((0, 1))", "x.cumprod((0, 1))", "x.unsqueeze((0, 1))", "x.chunk(2, (0, 1))",
        "x.gather((0, 1), [[0]])", "ndl.concatenate([x, x], (0, 1))", "ndl.stack([x], (0, 1))",
        "x.repeat(2, (0, 1))", "x.topk(1, (0, 1))", "x.index_select((0, 1), [0])",
    ):  # fmt: skip
        with naming(text), pytest.raises(TypeError, match="takes one axis, a whole number, not"):
            eval(text, {"x": x, "ndl": ndl})
    for text in ("x.moveaxis(2, 0)", "x.moveaxis(0, 2)"):
        with naming(text), pytest.raises(ValueError, match="moveaxis: axis 2 does not exist"):
            eval(text, {"x": x})


def test_median_along_dim_of_nan_is_the_first_nan():
    x = ndl.Tensor([[1, np.nan, 2, np.nan], [4, 3, 1, np.inf]])
    for keepdim in (False, True):
        values, indices = x.median(dim=1, keepdim=keepdim)
        np.testing.assert_array_equal(values.numpy().ravel(), [np.nan, 3])
        assert indices.numpy().ravel().tolist() == [1, 1] and values.ndim == 1 + keepdim
    values.sum().backward()
    assert x.grad.numpy().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    for words in ({}, {"axis": 0}, {"dim": 0}, {"dim": 0, "keepdim": True}):
        with naming(words), pytest.raises(ValueError, match="median: a, of shape .0, 3., has no"):
            ndl.median(ndl.zeros(0, 3), **words)


def test_a_result_has_memory_of_its_own():
    for dtype in ("float32", "int64", "bool"):
        for text in (
            "x ** 1", "x.floor()", "x.ceil()", "x.round()", "x.trunc()", "x.nan_to_num()",
            "x.sum(())", "x.clip()", "x[None].cumprod(0)[0]", "ndl.roll(x, (), ())",
            "ndl.roll(x, 0)", "ndl.roll(x, 2)", "x.tile(1)", "x[None].prod(0)", "x.repeat(1)",
        ):  # fmt: skip
            x = ndl.tensor([1, 0], dtype=dtype)
            with naming(f"{text} of {dtype}"):
                y = eval(text, {"x": x, "ndl": ndl})
                assert y.numpy().tolist() == [1, 0]
                y[0] = 0
                assert x.numpy().tolist() == [1, 0]


def test_methods_are_those_of_the_table():
    for name, spelling in TABLE.items():
        with naming(name):
            if not spelling.means.startswith("Tensor."):
                assert hasattr(ndl.NDArray, name) == ("array" in spelling.where)
            assert hasattr(ndl.Tensor, name) or "method" not in spelling.where
            there = name if spelling.numpy == "=" else spelling.numpy
            assert not there.isidentifier() or callable(getattr(np, there))


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
