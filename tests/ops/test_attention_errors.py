"""Attention on a GPU compared with float64, as are cuDNN and FlashAttention in PyTorch on the same
16-bit inputs: the error of needle is at most theirs, over random shapes, strides and masks."""

import math

import numpy as np
import pytest
from harness import attended_both_ways, poison

import needle as ndl
from needle import _C
from needle.block_mask import BlockMask
from needle.testing import rounder
from needle.testing.attention import softmax_attention, softmax_attention_bwd, visible
from needle.testing.bounds import HALF_ULP

pytestmark = [pytest.mark.cuda, pytest.mark.parity]
exactly = rounder("float64")
WHAT = ("o", "dq", "dk", "dv")


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of the difference, in that of the exact values."""
    return float(np.sqrt(((got - exact) ** 2).mean() / max((exact**2).mean(), 1e-30)))


def of_needle(q, k, v, dout, dtype: str, causal: bool, mask) -> dict:
    device = ndl.cuda()
    arrays = [_C.array(x, dtype=dtype, device=device) for x in (q, k, v, dout)]
    poison(device, 4 * q.size)
    lists = () if mask is None else (*mask.lists(device), mask.block)
    o, _, gradients = attended_both_ways(*arrays, 1 / math.sqrt(q.shape[3]), int(causal), lists)
    return dict(zip(WHAT, [x.numpy().astype(np.float64) for x in (o, *gradients)]))


def of_torch(q, k, v, dout, dtype: str, causal: bool, backend, see) -> dict:
    import torch
    from torch.nn.attention import sdpa_kernel

    def tensor(x: np.ndarray):
        x = torch.from_numpy(x).to("cuda", getattr(torch, dtype))
        return x.transpose(1, 2).contiguous().requires_grad_()

    operands = [tensor(x) for x in (q, k, v)]
    seen = None if see is None else torch.from_numpy(see).cuda()
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(
            *operands, attn_mask=seen, is_causal=causal and see is None
        )
    gradients = torch.autograd.grad(o, operands, tensor(dout))
    found = [x.detach().transpose(1, 2).double().cpu().numpy() for x in (o, *gradients)]
    return dict(zip(WHAT, found))


def problem_of(seed: int, masked: bool):
    """(B, T, S, H, D, dtype, causal, block, seed)"""
    rng = np.random.default_rng(seed)
    T = rng.choice([1, 31, 64, 65, 127, 128, 129, 191, 193, 256, 300, 449])
    causal = bool(rng.integers(2))
    # PyTorch's causal mask begins at the first key, needle's ends at the last: the same for S = T.
    S = T if causal or masked else rng.choice([1, 33, 128, 200, 385])
    D, dtype = 8 * rng.integers(1, 17), str(rng.choice(["bfloat16", "float16"]))
    block = int(rng.choice([64, 128])) if masked else 0
    sizes = map(int, (rng.integers(1, 3), T, S, rng.integers(1, 4), D))
    return *sizes, dtype, causal, block, seed


def compare(problem, backends, ratios: list[float]) -> None:
    B, T, S, H, D, dtype, causal, block, seed = problem
    generator = np.random.default_rng(seed)
    r = rounder(dtype)
    shapes = [(B, T, H, D), (B, S, H, D), (B, S, H, D), (B, T, H, D)]
    q, k, v, dout = (r(generator.standard_normal(shape)) for shape in shapes)
    see, mask = visible(T, S, causal), None
    if block:
        n = -(-T // block)
        kept = generator.random((H, n, n)) < 0.4
        kept[:, np.arange(n), np.arange(n)] = True  # PyTorch gives NaN to a query without keys
        mask = BlockMask(kept, block, T)
        see = see & mask.to_dense()
    scale = 1 / math.sqrt(D)
    exact = softmax_attention(exactly, q, k, v, scale, see)
    exact |= softmax_attention_bwd(exactly, dout, q, k, v, exact["o"], exact["lse"], scale, see)
    ours = of_needle(q, k, v, dout, dtype, causal, mask)
    theirs, little = [], HALF_ULP[dtype] / 4
    for backend in backends:
        try:
            theirs.append(of_torch(q, k, v, dout, dtype, causal, backend, see if block else None))
        except RuntimeError as refused:  # a shape that it does not take
            assert "No available kernel" in str(refused), refused
    for what in WHAT:
        mine = error(ours[what], exact[what])
        assert np.isfinite(mine), f"{what} of {problem}: not written, or not finite"
        if theirs and (exact[what] ** 2).mean() > 1e-12:
            worst = max(error(other[what], exact[what]) for other in theirs)
            assert mine <= 1.25 * worst + little, f"{what}: {mine:.2e}, baseline {worst:.2e}"
            ratios.append(mine / max(worst, little))


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "blocks"])
def test_attention_errors_are_at_most_those_of_pytorch(masked):
    import torch
    from torch.nn.attention import SDPBackend

    assert torch.cuda.is_available(), "this PyTorch was built without CUDA"

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if masked:  # the one that takes a mask
        backends = [SDPBackend.EFFICIENT_ATTENTION]
    ratios: list[float] = []

    for seed in range(60):
        compare(problem_of(seed, masked), backends, ratios)
    assert len(ratios) > 100
    middle = float(np.exp(np.mean(np.log(np.maximum(ratios, 1e-3)))))
    print(f"{len(ratios)} errors, {middle:.3f} of PyTorch's in the geometric mean")
    assert middle <= 1.02
