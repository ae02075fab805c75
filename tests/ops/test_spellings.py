"""Ordinary spellings of PyTorch, NumPy and the course, as they are typed on the first day."""

import re

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle import nn
from needle.ops import instead
from needle.ops.spellings import SPELLINGS as TABLE
from needle.testing.elementwise import gelu, gelu_tanh

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
ndl.zeros_like(x, dtype=None, device=None) = 0 * x
F.one_hot(e.T[0].long(), 0) = np.zeros((0, 0), int)
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
F.cross_entropy(x, r, ignore_index=0) = nll[1:].mean()
F.nll_loss(x, [7] * 3, ignore_index=7) = np.float32(0)
F.one_hot(i) = np.eye(4, dtype="i8")[i]
F.cross_entropy(x, [0, -100, 1], "none") = nll * [1, 0, 1]
F.nll_loss(F.log_softmax(x), r) = nll.mean()
F.nll_loss(F.log_softmax(x), [0, -100, 1]) = nll[[0, 2]].mean()
F.nll_loss(ndl.zeros(9, 2).half() - 6e4, [1] * 9) = np.float16(6e4)
F.nll_loss(ndl.tensor([[-np.inf, -1.0]] * 2), [1, -100]) = np.float32(1)
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
x.squeeze(dim=0) = x ; x[None].squeeze(dim=(0, 1)) = x ; x.mT = x.T ; ndl.trunc(x) = np.trunc(x)
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
ndl.count_nonzero(i) = (i != 0).sum() ; ndl.count_nonzero(b, dim=1) = b.sum(1)
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
ndl.ops.reshape(x, np.array([4, 3])) = x.reshape(4, 3)
ndl.ops.all(b, np.array([0, 1])) = b.all() ; ndl.ops.permute(x, reversed([0, 1])) = x.T
ndl.ops.broadcast_to(x[:1], np.array([3, 4])) = x[[0, 0, 0]]
ndl.take_along_axis(x, i, axis=1) = np.take_along_axis(x, i, 1) ; b.int() = b.astype("i4")
x.repeat_interleave(2) = x.repeat(2) ; ndl.cat([x, y], dim=1) = np.hstack([x, y]) ; x.t() = x.T
ndl.expand_dims(x, 0) = x[None] ; ndl.eye(3) = np.eye(3, dtype="f4") ; x.ndim = 2 ; x.dim() = 2
x[0].expand(2, -1) = x[[0, 0]] ; ndl.empty(2).size = 2 ; ndl.rand_like(x).shape = (3, 4)
(x * 1).sub_(1) = x - 1 ; ndl.inf > ndl.pi = True ; F.relu(x) = np.maximum(x, 0)
ndl.manual_seed(0) = None ; ndl.optim.SGD([nn.Parameter(x)]).zero_grad() = None
nn.ModuleList([nn.ReLU()])[0](x) = np.maximum(x, 0) ; nn.CrossEntropyLoss()(x, r) = nll.mean()
nn.MSELoss()(x, y) = ((x - y) ** 2).mean() ; nn.L1Loss()(x, y) = np.abs(x - y).mean()
nn.BCEWithLogitsLoss()(x, p) = (np.log1p(np.exp(x)) - x * p).mean() ; nn.Tanh()(x) = np.tanh(x)
nn.KLDivLoss()(x, p) = (p * (np.log(p) - x)).mean() ; nn.Sigmoid()(x) = 1 / (1 + np.exp(-x))
nn.SiLU()(x) = x / (1 + np.exp(-x)) ; nn.RMSNorm(4)(x) = x / np.sqrt((x**2).mean(1)[:, None] + 1e-6)
nn.LayerNorm(4)(x) = (x - x.mean(1)[:, None]) / np.sqrt(x.var(1)[:, None] + 1e-5)
nn.Residual(nn.ReLU())(x) = x + np.maximum(x, 0) ; nn.Flatten()(t) = t.reshape(2, -1)
nn.SoftmaxLoss()(x, r) = nll.mean() ; nn.CrossEntropyLoss(reduction="sum")(x, r) = nll.sum()
nn.CrossEntropyLoss("none", 0)(x, r) = np.where(r == 0, 0, nll) ; nn.GELU()(x) = gelu(x)
nn.GELU("tanh")(x) = gelu_tanh(x)
x.half().element_size() = 2 ; x.T.stride() = (1, 4) ; x.T.stride(-1) = 4 ; ndl.is_tensor(x) = True
x.data_ptr() - x[1].data_ptr() = -16 ; x.stride() = (4, 1)
ndl.arange(5) = np.arange(5) ; ndl.arange(1, 4) = np.arange(1, 4) ; ndl.arange(3.0) = np.arange(3.0)
ndl.arange(4, 1, -1) = np.arange(4, 1, -1) ; ndl.arange(0, 1, 0.25) = np.arange(0, 1, 0.25)
ndl.arange(2, 2) = np.arange(2, 2) ; ndl.arange(3, dtype="bfloat16").dtype = "bfloat16"
ndl.unique(i) = np.unique(i)
i.unique(return_inverse=True)[0][i.unique(return_inverse=True)[1]] = i
i.unique(return_counts=True)[1] = np.unique(i, return_counts=True)[1]
ndl.unique(x.to("bfloat16")).dtype = "bfloat16"
ndl.sort(x, None) = np.sort(x, None) ; ndl.argsort(x, axis=None) = np.argsort(x, None)
ndl.sort(e) = e ; ndl.topk(x, 0)[0].shape = (3, 0) ; ndl.cumsum(e.T, 1) = e.T
ndl.sort(s, None) = s.reshape(1) ; ndl.any(e) = np.any(e) ; ndl.all(e) = np.all(e)
ndl.tensor([0.0, 300.0, 300.0]).half().cumprod(0) = np.zeros(3, "f2")
ndl.tensor([300.0, 0.5, 300.0, 0.5]).half().prod() = np.float16(22500)
ndl.prod(e) = np.prod(e) ; ndl.tile(e, (2, 1)) = np.tile(e, (2, 1)) ; ndl.roll(e, 1) = e
ndl.pad(e, 1, 5) = np.pad(e, 1, constant_values=5) ; ndl.norm(e) = np.float32(0)
len(ndl.chunk(e, 2)) = 1 ; ndl.sum(e, 0) = e.sum(0) ; ndl.sum(e, 1) = e.sum(1)
ndl.nonzero(e)[0] = np.nonzero(e)[0] ; s.flatten() = s.reshape(1)
ndl.gather(e, 0, np.zeros((0, 3), int)) = e ; s.unsqueeze(0) = s.reshape(1) ; s.clip(3) = s + 1
s.std() = s - 2 ; s.repeat(3) = s.repeat(3) ; ndl.einsum(",->", s, s) = s * s
ndl.round(x * 99, -1) = np.round(x * 99, -1) ; t.flatten(end_dim=-2) = t.reshape(6, 4)
ndl.isfinite(ndl.nan_to_num(n.bfloat16())) = np.ones(3, bool)
ndl.nan_to_num(n.half()).max() = np.float16(65504)
ndl.nan_to_num(n, 7, 0) = np.nan_to_num(n, True, 7, 0) ; (-n).nan_to_num(neginf=0)[1] = 0 * x[0, 0]
(i - 2).clip(0) = np.maximum(i - 2, 0) ; i.clip(max=0) = 0 * i ; x.size(0) = 3 ; x.stride(0) = 4
x.var(dim=1, correction=0) = x.var(1) ; x.std(dim=0, unbiased=False) = x.std(0)
ndl.var_mean(x, 1, True, True)[1] = x.mean(1, keepdims=True) ; x.var(0, False) = x.var(0)
ndl.std_mean(x, 0, True, True)[0] = x.std(0, ddof=1, keepdims=True)
ndl.std_mean(x, 0, True, True)[1] = x.mean(0, keepdims=True)
x.std(0, True) = x.std(0, ddof=1) ; ndl.var(x, 1, True, True) = x.var(1, ddof=1, keepdims=True)
ndl.full((2,), -100) = np.full(2, -100) ; ndl.full([1, 2], True) = np.full((1, 2), True)
ndl.full(2, np.uint8(3)) = np.full(2, 3) ; ndl.full((), 7.0, dtype=None) = np.float32(7)
nn.LayerNorm((4,), 0)(x) = (x - x.mean(1)[:, None]) / x.std(1)[:, None]
x.take_along_dim(i, 1) = np.take_along_axis(x, i, 1) ; r.bincount() = np.bincount(r)
i.count_nonzero() = (i != 0).sum() ; x.clone().index_add_(0, [0], y[:1])[0] = x[0] + y[0]
x.clone().scatter_add_(1, i[:1], y)[0] = x[0] + y[0] @ np.eye(4)[i[0]].astype("f4")
ndl.norm(x, 0, 1, True) = norm(x, 0, 1, True) ; ndl.norm(x, 1, 0, True) = norm(x, 1, 0, True)
ndl.norm(x, 3, 1, True) = norm(x, 3, 1, True) ; x.norm(np.inf, 0, True) = norm(x, np.inf, 0, True)
x.argmin(1, keepdims=True) = x.argmin(1, keepdims=True)
ndl.argmax(x, 0, True) = x.argmax(0, keepdims=True)
ndl.stack([x, y], -1) = np.stack([x, y], -1) ; t.tile(2) = np.tile(t, 2)
ndl.roll(x, 10, (0, 1)) = np.roll(x, 10, (0, 1)) ; nn.init.calculate_gain("leaky_relu", 0) = 2**0.5
ndl.meshgrid(r, x[0], y[0])[2] = np.meshgrid(r, x[0], y[0])[2]
x.gather(0, i[:1, :2] % 3) = np.take_along_axis(x[:, :2], i[:1, :2] % 3, 0)
ndl.take_along_axis(x, r, None) = np.take_along_axis(x, r, None)
x.scatter_add(1, i[:1], y) = x + [[1], [0], [0]] * (y[0] @ np.eye(4)[i[0]])
x.scatter(0, i[:1] % 3, y) = np.where(np.arange(3)[:, None] == i[:1] % 3, y[:1], x)
x.nonzero(as_tuple=False) = np.argwhere(x) ; ndl.linspace(0, 1, steps=0) = np.zeros(0, "f4")
ndl.tensordot(t, y, (-1, -1)) = np.tensordot(t, y, (-1, -1)) ; F.normalize(x, eps=99) = x / 99
F.one_hot(r, 7) = np.eye(7, dtype="i8")[r] ; F.normalize(t, 1, 0) = t / np.abs(t).sum(0)
F.cosine_similarity(t, t * 2, -1) = np.ones((2, 3), "f4")
F.cosine_similarity(x, y, eps=99) = (x * y).sum(1) / 99**2
F.layer_norm(x, (4,), y[0], y[1], 0) = (x - x.mean(1)[:, None]) / x.std(1)[:, None] * y[0] + y[1]
F.scaled_dot_product_attention(q, q, q, scale=0)[..., 0, :] = q.mean(2)
F.scaled_dot_product_attention(q, q, q, is_causal=True)[..., 0, :] = q[..., 0, :]
F.scaled_dot_product_attention(q[..., :1, :], q, q, is_causal=True) = q[..., :1, :]
F.scaled_dot_product_attention(q[0], q[0], q[0], None, 0.0) = attended[0]
F.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0], is_causal=True)[0] = q[0, 0, 0]
nn.RMSNorm([4], 9)(x) = x / np.sqrt((x**2).mean(1)[:, None] + 9)
nn.BatchNorm1d(4, 9)(x) = (x - x.mean(0)) / np.sqrt(x.var(0) + 9)
"""


def test_spellings_have_numpys_values():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    x, q = draw(3, 4), draw(1, 2, 3, 4)
    arrays = {"x": x, "y": draw(3, 4), "p": np.abs(draw(3, 4)) + 0.1, "t": draw(2, 3, 4), "q": q}
    arrays |= {"i": rng.integers(0, 4, (3, 4)), "b": x > 0, "r": np.array([0, 3, 1])}
    arrays |= {"e": np.zeros((0, 3), np.float32), "s": np.array(2, np.float32)}
    arrays["n"] = np.array([np.nan, np.inf, 1], np.float32)
    weights = np.exp(q @ q.swapaxes(2, 3) / 2)
    wanted = {
        "np": np,
        "norm": np.linalg.norm,
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
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
        ("x.double()", "float32"), ("x.retain_grad()", "ndl.autograd.grad"),
        ("ndl.compile(net)", "leave it out"), ("ndl.backends.cudnn", "leave it out"),
        ("optim.lr_scheduler.StepLR", "optim.Cosine(lr, total=steps)"), ("F.conv2d", "left out"),
        ("nn.MultiheadAttention(8, 2)", "nn.AttentionLayer"), ("cuda.synchronize()", "ndl.cuda()"),
        ("autograd.Function", "ndl.autograd.TensorOp"),
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
    net = nn.Sequential()
    net.register_hook = "own"
    assert net.register_hook == "own"


@pytest.mark.parity
def test_absent_names_are_pytorchs():
    torch = pytest.importorskip("torch")
    owners = torch, torch.nn, torch.nn.functional, torch.optim, torch.autograd, torch.cuda
    owners = (*owners, torch.Tensor, torch.nn.Module, torch.amp)
    for name in instead.HINTS:
        assert any(hasattr(owner, name) for owner in owners), name


ONE_AXIS = (
    "x.max(dim=(0, 1))", "x.median(dim=(0, 1))", "x.sort(dim=(0, 1))", "x.cumsum((0, 1))",
    "x.cumprod((0, 1))", "x.unsqueeze((0, 1))", "x.chunk(2, (0, 1))", "x.gather((0, 1), [[0]])",
    "ndl.concatenate([x, x], (0, 1))", "ndl.stack([x], (0, 1))", "x.repeat(2, (0, 1))",
    "x.topk(1, (0, 1))", "x.index_select((0, 1), [0])",
)  # fmt: skip
TOO_LARGE = (
    "ndl.tensor([300], dtype='uint8')", "ndl.tensor(np.int64(300), dtype='uint8')",
    "ndl.tensor([[0], [-1]], dtype='uint16')", "ndl.tensor([1e10], dtype='int32')",
    "ndl.Tensor([2**63], dtype='int64')", "ndl.tensor([2**70])", "ndl.tensor(-2**64)",
    "i.__setitem__(0, [300])", "i.__setitem__(0, -1)", "i.cached_data.__setitem__(0, [300])",
    "ndl.full((2,), 2**70)", "i + 300", "i.cached_data + 300",
)  # fmt: skip
REFUSED = [
    *((text, TypeError, "takes one axis, a whole number, not") for text in ONE_AXIS),
    *((text, OverflowError, None) for text in TOO_LARGE),
    *((f"x.{call}", TypeError, "are the same: give one of them")
      for call in ("max(0, dim=1)", "squeeze(0, dim=1)", "min(axes=0, axis=1)")),
    *((f"x.{call}", TypeError, None)
      for call in ("sum(True)", "max(dim=False)", "cached_data.sum(True)", "squeeze(True)")),
    ("ndl.ops.mean(x, axs=0)", TypeError, "mean: got an unexpected keyword argument 'axs'"),
    ("ndl.ops.permute(x, 1, 0)", TypeError, "permute: too many positional arguments"),
    ("ndl.ops.reshape(x, size=(4, 3))", TypeError, "reshape: "),
    ("x.max(axis=7)", ValueError, "max: axis 7 does not exist"),
    *((f"x.{call}", TypeError, "an axis is a whole number, not")
      for call in ("mean(1.5)", "sum('a')", "max((0, 1.5))")),
    ("x.any(7)", ValueError, "any: axis 7 does not exist"),
    ("ndl.ops.all([True])", TypeError, "all: "),
    ("x @ x", ValueError, "the last axis of a is 4, but the last but one of b is 3"),
    ("x.split(0)", ValueError, "size must be 1 or more"),
    ("x.split([1, 1], 1)", ValueError, "do not sum to 4"),
    ("x.split([5, -1], 1)", ValueError, r"sizes \[5, -1\] are below 0"),
    ("x.flatten(1, 0)", ValueError, "flatten: start 1 comes after end 0"),
    ("nn.init.kaiming_normal_(x, mode='fan')", ValueError, "mode must be 'fan_in' or 'fan_out'"),
    ("x[0].tril()", ValueError, "tril: a must have 2"),
    ("ndl.diag(x[None])", ValueError, "diag: a must be a vector"),
    ("x.diagonal(0, 1, -1)", ValueError, "axis1 and axis2 are both 1"),
    ("x.moveaxis(2, 0)", ValueError, "moveaxis: axis 2 does not exist"),
    ("x.squeeze(0)", ValueError, "not all of size 1"),
    ("x.chunk(0)", ValueError, "chunks must be 1"),
    ("x.pad(-1)", ValueError, "widths must be 0"),
    ("ndl.dot(x[None], x)", ValueError, "dot: at most 2 axes"),
    ("x @ ndl.tensor(1.0)", ValueError, "has no axes"),
    ("ndl.linalg.norm(x, 2)", ValueError, "ord 2 of 2 axes is no norm of vectors"),
    ("ndl.meshgrid(x, indexing='x')", ValueError, "must be 'ij' or 'xy'"),
    ("ndl.tensordot(x, x, ([0], [0, 1]))", ValueError, "name 1 axes of a and 2 of b"),
    ("ndl.tensordot(x, x, ([0, 0], [0, 1]))", ValueError, "an axis is named twice"),
    ("ndl.bincount(ndl.tensor([1, -1]))", ValueError, "no negative elements"),
    ("x.gather(1, [[4]])", IndexError, "gather: index 4 is out of range for axis 1"),
    ("x.gather(1, [[-5]])", IndexError, "gather: index -5 is out of range for axis 1"),
    ("x.gather(1, [[0.5]])", TypeError, "must hold whole numbers"),
    ("x.scatter(1, [[0, 1]], x[:, :1])", ValueError, "scatter: src is .3, 1., too small"),
    ("x.scatter_add(0, [[0, 1]], x[:, :1])", ValueError, "scatter_add: src"),
    ("x.index_add(0, [0], x)", ValueError, "index_add: source must be"),
    ("x.index_select(0, [True, False])", TypeError, "must be whole numbers"),
    ("x.cached_data.index_select(2, [0])", IndexError, "index_select: axis"),
    ("F.embedding([True], x)", TypeError, "must be whole numbers"),
    ("F.nll_loss(x, ndl.tensor([0, 1, -1]))", ValueError, "number below 0"),
    ("F.pad(x, (1,))", ValueError, "needs pairs"),
    ("F.nll_loss(x, [0, 1, 2], x)", TypeError, "positional"),
    ("ndl.unique(x, True)", TypeError, "positional"),
    ("ndl.einsum('ij', [x])", TypeError, "einsum: operand 0 must be a Tensor"),
    ("F.scaled_dot_product_attention(x, x, x, x > 0)", ValueError, "has no attn_mask"),
    ("F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)", ValueError, "no dropout_p"),
    *((f"ndl.{call}", TypeError, f"{call.partition('(')[0]}: a must be a Tensor, but is list")
      for call in (
          "median([1])", "sort([1])", "argmax([1])", "cumsum([1], 0)", "var([1])", "pad([1], 1)",
          "max([1], dim=0)", "roll([1], 1)", "tril([[1]])", "squeeze([1])", "chunk([1], 1)",
          "gather([1], 0, [0])", "clip([1], 0)", "topk([1], 1)", "index_select([1], 0, [0])")),
    ("nn.Attention(8, 3)", ValueError, "features 8 are no multiple of heads 3"),
    ("nn.Attention(8, 0)", ValueError, "features 8 are no multiple of heads 0"),
    *((f"nn.{layer}(ndl.ones({shape}))", ValueError, said) for layer, shape, said in (
        ("Linear(64, 8)", "2, 5, 3", "Linear: in_features is 64, got 3: the last axis"),
        ("Linear(4, 2)", "", "Linear: in_features is 4, got x without axes"),
        ("TiedHead(nn.Embedding(8, 64))", "2, 3", "Embedding: embedding_dim is 64, got 3"),
        ("LayerNorm1d(64)", "2, 3", "LayerNorm1d: dim is 64, got 3"),
        ("BatchNorm1d(64)", "2, 5, 3", "BatchNorm1d: dim is 64, got 3"),
        ("BatchNorm1d(4)", "2, 1", "BatchNorm1d: dim is 4, got 1"),  # would broadcast
        ("BatchNorm1d(4)", "2, 5, 4", r"x must be \(B, 4\), but its shape is \(2, 5, 4\)"),
        ("Transformer(64, 8, 1)", "2, 1, 1", "Transformer: embedding_size is 64, got 1"))),
    *((f"ndl.ops.linear_cross_entropy({given}, {turned})", error, f"^linear_cross_entropy: {said}")
      for turned in (False, True) for given, error, said in (
          ("x, b, i[:1]", ValueError, "w must have two axes"),
          ("x, ndl.ones(4, 5, 6), i[:1]", ValueError, "w must have two axes"),
          ("x.numpy(), w, i[:1]", TypeError, "x must be a Tensor, but is ndarray"),
          ("x, w.numpy(), i[:1]", TypeError, "w must be a Tensor, but is ndarray"),
          *((f"x, ndl.ones(4, 4), {targets}", TypeError, "targets must be whole numbers, but are ")
            for targets in ("[0, None, 1]", "'abc'")),
          *((f"x, ndl.ones(4, 4), {targets}", ValueError, said) for targets, said in (
              ("[[1], [1, 2]]", "targets: .*inhomogeneous"),
              ("[0, 1, np.nan]", r"nan at \(2,\) is not a whole number"),
              ("[0, 1, 2.5]", r"2.5 at \(2,\) is not a whole number"))))),
    ("F.cross_entropy(x.numpy(), i)", TypeError,
     "^cross_entropy: logits must be a Tensor, but is ndarray"),
    ("F.pad(x, (1, 1), 'reflect')", ValueError, "the mode 'constant'"),
    ("F.cross_entropy(x, [0, 1, 2], reduction='x')", ValueError, "reduction must be"),
    ("F.mse_loss(x, x[0])", ValueError, "mse_loss: target is"),
    ("ndl.concatenate([x, x[:2]], 1)", ValueError, "may differ in axis 1 alone"),
    ("ndl.concatenate([x, x.int()])", TypeError, "Tensor 1 is int32, but the first is float32"),
    ("ndl.stack([x.int(), x])", TypeError, "Tensor 1 is float32, but the first is int32"),
    ("ndl.concatenate([])", ValueError, "one Tensor or more"),
    ("ndl.ops.linear(x, w, residual=x)", ValueError, "linear: residual must be"),
    ("F.gelu_mlp(x, w, w[0], w.T, b, residual=b)", ValueError, "gelu_mlp: residual must be"),
    ("F.linear_transposed(x, b)", ValueError, "out of range for 1 axes"),
    ("ndl.matmul(x, x)", ValueError, None), ("x.reshape(4, 4)", ValueError, None),
    ("x.broadcast_to((3, 5))", ValueError, None), ("F.linear(x, w)", ValueError, None),
    ("F.gelu(x, approximate='cosine')", ValueError, None), ("x.sum(2)", ValueError, None),
    ("F.cross_entropy(x[:2], [0, 4])", ValueError, r"4 at \(1,\) is not a whole number below 4$"),
    ("F.embedding([[0, -1]], x)", ValueError, r"-1 at \(0, 1\) is not a whole number from 0 to 2"),
    ("F.embedding(np.array([2, 2**32]), x)", ValueError, r"4294967296 at \(1,\) is not a"),
    ("ndl.tensor([0, np.nan], dtype='int64')", ValueError, "NaN is no integer"),
    ("ndl.roll(x, (1, 2), 0)", ValueError, "roll: 2 shifts for 1 axes"),
    ("x.pad((1, 2, 3))", ValueError, r"pad: widths \(1, 2, 3\) for 2 axes"),
    ("x.repeat([1, 2], 0)", ValueError, r"repeat: \[1, 2\] repeats along axis 0"),
    ("ndl.bincount(x)", ValueError, "bincount: a must be a vector of whole numbers"),
    ("ndl.bincount(ndl.tensor([[1]]))", ValueError, r"but is int64 of shape \(1, 1\)"),
    ("x.expand(-1, 3, 4)", ValueError, "axis 0 has the negative size -1"),  # a new axis
    ("i.long().__setitem__(0, np.nan)", ValueError, "NaN is no integer"),
    ("x.topk(5)", ValueError, "k is 5"), ("x.topk(-1)", ValueError, "k is -1"),
    ("ndl.tensordot(x, x, ([0, 1], [0, 0]))", ValueError, "tensordot: an axis is named twice"),
    ("x.topk(1.5)", TypeError, None), ("x.sort(2)", ValueError, "sort: axis 2 does not"),
    *((f"ndl.einsum({text!r}, x)", ValueError, "einsum")
      for text in ("ij,jk", "ijk", "ij->ik", "ij->ii", "i?")),
    ("ndl.einsum('ii', x[:1])", ValueError, "einsum: 'ii': axis i is 4, but was 1"),
    *((f"ndl.ops.{name}({given}, mask={mask})", error, f"^{name}: {said}")
      for name, given in (("attention", "q, q, q"), ("block_sparse_attention", "q, q, q"),
                          ("qkv_attention", "qkv, angles, angles"))
      for mask, error, said in (
          ("np.ones((8, 8), bool)", TypeError, "mask must be a BlockMask, not ndarray"),
          ("BlockMask.local(16, 4, 4)", ValueError, "the mask is for 16 queries"),
          ("BlockMask(np.ones((3, 2, 2), bool), 4, 8)", ValueError, "the mask is for 3 h"))),
    ("nn.Attention(8, 2)(ndl.ones(1, 8, 8), None, x)", TypeError, "ttention: mask must be a Block"),
    ("ndl.ops.attention(q, ndl.ones(1, 8, 1, 9), q)", ValueError, "attention"),
    ("ndl.ops.attention(*[ndl.ones(1, 4, 1, 257)] * 3)", ValueError, "256"),
    ("ndl.ops.attention(q, q[:, :5], q[:, :5])", ValueError,
     "causal needs .* 5 for 8; pass causal=False"),
    ("ndl.ops.qkv_attention(qkv.numpy(), angles, angles)", TypeError,
     "^qkv_attention: qkv must be a Tensor, but is ndarray"),
    ("ndl.ops.rotary(qkv.numpy(), angles, angles, 2)", TypeError,
     "^rotary: x must be a Tensor, but is ndarray"),
    *((f"ndl.ops.dilated_attention(q, q, {given})", error, said)
      for given, error, said in (
          ("q, (4, 8), (1,)", ValueError, r"one a branch, but are \[4, 8\] and \[1\]"),
          ("q, (), ()", ValueError, "one a branch"),
          ("q, (0,), (1,)", ValueError, r"must be numbers above 0, .* \[0\]"),
          ("q, (4,), (1.5,)", TypeError, "float"),
          ("q[:, 1:], (4,), (1,)", ValueError, r"must have one shape \(B, T, H, D\), but have"))),
]  # fmt: skip


def test_what_is_refused_says_what_is_wrong():
    names = {"F": nn.functional, "ndl": ndl, "nn": nn, "np": np}
    for text, error, message in REFUSED:
        names |= {"x": ndl.ones(3, 4), "i": ndl.tensor([1, 2], dtype="uint8")}
        names |= {"w": ndl.ones(4, 5), "b": ndl.ones(4), "BlockMask": ndl.BlockMask}
        names |= {"q": ndl.ones(1, 8, 1, 4), "qkv": ndl.ones(1, 8, 1, 3, 4)}
        names |= {"angles": np.ones((8, 2), np.float32)}
        with naming(text), pytest.raises(error, match=message):
            eval(text, names)


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
            "x[None].tile((2, 1))[0]",
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
