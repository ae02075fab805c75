"""Do needle and PyTorch learn the same? Steps on real text from the same weights and batches.

    python benchmarks/losses.py        with a GPU: Pythia-70m, 500 steps of 16 x 2048 tokens
    python benchmarks/losses.py --device cpu --model tiny --steps 60 --batch-size 4 --seq-len 128

The text is the sources of Python's standard library, tokenised once (vocabulary 4,096), in batches
that begin anywhere. Both sides clip to norm 1 and take AdamW's step at one learning rate, which
warms up over the first tenth. The baseline is train_step.py's compiled one, or --baseline.
Printed are the means of the losses over a tenth of the steps, at every fiftieth part; they must be
within 0.01 of each other, else the exit code is 1.

    python benchmarks/losses.py --gradients --batch-size 2

compares the gradients of one step instead: of both sides, PyTorch's uncompiled and under autocast,
with those of PyTorch in float64 from the same weights, by the norm of the difference over the norm,
of all together and of each parameter. needle's may be at most 1.25 of PyTorch's, all together and
in the geometric mean of the parameters; with --fp8 at most 4.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import bench
import numpy as np

import needle as ndl
from needle import nn, optim
from needle.data import open_data

NEAR = 0.01
NO_WORSE, NO_WORSE_FP8 = 1.25, 4.0  # of PyTorch's errors
NAMES = {
    "input_layernorm": "norm_attention",
    "post_attention_layernorm": "norm_mlp",
    "attention.query_key_value": "qkv",
    "attention.dense": "dense",
    "mlp.dense_h_to_4h": "up",
    "mlp.dense_4h_to_h": "down",
    "final_layer_norm": "norm",
    "embed_in": "embed",
    "embed_out": "head",
}


def as_theirs(source: nn.Module, values: Callable[[Any], Any]) -> dict[str, np.ndarray]:
    """values(parameter) of each, by PyTorch's names. needle multiplies x @ w, PyTorch x @ w.T;
    heads lie alike."""
    found = {}
    for name, p in source.named_parameters():
        for ours, other in NAMES.items():
            name = name.replace(ours, other)
        array = values(p).numpy()
        if p.ndim == 2 and name != "embed.weight":
            array = array.T
        found[name] = np.array(array)
    return found


def copy_weights(source: nn.Module, target: Any) -> None:
    import torch

    theirs, ours = dict(target.named_parameters()), as_theirs(source, lambda p: p)
    assert theirs.keys() == ours.keys(), f"not in both: {sorted(theirs.keys() ^ ours.keys())}"
    with torch.no_grad():
        for name, values in ours.items():
            theirs[name].copy_(torch.from_numpy(values))


def compare_gradients(
    model: nn.Module, side: Any, ids: np.ndarray, targets: np.ndarray, no_worse: float
) -> int:
    """The exit code."""
    import torch

    model.loss(ids, targets).backward()
    pair = [torch.from_numpy(np.array(x)).to(side.device) for x in (ids, targets)]
    exact = copy.deepcopy(side.model).double()
    exact(*pair).backward()
    with torch.autocast(side.device.type, torch.bfloat16, side.autocast):
        loss = side.model(*pair)
    loss.backward()
    ours = as_theirs(model, lambda p: p.grad)
    theirs = {name: p.grad for name, p in side.model.named_parameters()}
    errors: list[dict[str, float]] = [{}, {}]
    norms = {name: p.grad.norm().item() for name, p in exact.named_parameters()}
    for name, p in exact.named_parameters():
        for error, grad in zip(errors, (torch.from_numpy(ours[name]), theirs[name])):
            error[name] = (grad.to(p.grad) - p.grad).norm().item()
    print("relative error of the gradient, float64 from the same weights: needle, PyTorch, ratio")
    for name, norm in norms.items():
        one, other = (error[name] / norm for error in errors)
        print(f"{name:32} {one:9.2e} {other:9.2e} {one / other:6.2f}")
    one, other = (math.hypot(*error.values()) / math.hypot(*norms.values()) for error in errors)
    mean = math.exp(np.mean([math.log(errors[0][name] / errors[1][name]) for name in norms]))
    print(f"all together {one:9.2e} {other:9.2e}, {one / other:.2f} of PyTorch's; the parameters'")
    print(f"ratios in the geometric mean {mean:.2f} (at most {no_worse})")
    return int(max(one / other, mean) > no_worse)


def smoothed(losses: list[float], width: int) -> np.ndarray:
    return np.convolve(losses, np.full(width, 1 / width), "valid")


def main() -> int:
    parser = bench.parser(
        __doc__,
        ("--steps", 500, "N", ""),
        ("--batch-size", 16, "B", ""),
        ("--seq-len", 2048, "T", ""),
        ("--baseline", "compile", "MODE", "see torch_training.py"),
        ("--gradients", bool, None, "of one step, beside float64"),
        ("--fp8", bool, None, "needle's products in FP8, as use_fp8() takes them"),
        ("--device", "cuda", None, "", "cpu", "cuda"),
        bench.MODEL,
    )
    args = parser.parse_args()
    bench.need("torch")
    import torch
    import torch_training

    on_gpu, shape = args.device == "cuda", (args.batch_size, args.seq_len)
    dtype = "bfloat16" if on_gpu else "float32"
    data = open_data(None, vocab_size=4096).train
    tokens = np.asarray(data[0 : len(data)], np.int64)
    config = bench.models.preset(args.model, max_seq_len=args.seq_len, dtype=dtype)
    np.random.seed(0)
    device = ndl.cuda() if on_gpu else ndl.cpu()
    model = config.model_class(config, device=device)
    one = tokens[: args.batch_size * args.seq_len + 1]  # batches are given below
    baseline = torch_training.TorchSide(config, args.device, dtype, one, shape, args.baseline)
    copy_weights(model, baseline.model)
    if args.fp8:
        model.use_fp8()
    if args.gradients:
        ids, targets = (part.reshape(shape) for part in (one[:-1], one[1:]))
        no_worse = NO_WORSE_FP8 if args.fp8 else NO_WORSE
        return compare_gradients(model, baseline, ids, targets, no_worse)
    optimizer = optim.AdamW(
        nn.flatten_parameters(model), weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8
    )
    draw, warmup, losses = np.random.default_rng(1), max(args.steps // 10, 1), ([], [])
    for step in range(1, args.steps + 1):
        rate = 1e-3 * min(1.0, step / warmup)
        starts = draw.integers(0, len(tokens) - args.seq_len - 1, args.batch_size)
        rows = np.stack([tokens[s : s + args.seq_len + 1] for s in starts])
        ids, targets = rows[:, :-1], rows[:, 1:]
        optimizer.lr = rate
        optimizer.reset_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        _, scale = optim.grad_norm(optimizer.flat, 1.0)
        optimizer.step(scale)
        losses[0].append(loss.item())
        del loss
        for group in baseline.optimizer.param_groups:
            group["lr"] = rate
        baseline.batches, baseline.steps = torch.from_numpy(np.stack([ids, targets])[None]), 0
        losses[1].append(baseline.queue()())
    width = max(args.steps // 10, 1)
    ours, theirs = (smoothed(each, width) for each in losses)
    print(f"{device.properties()['name']}, {args.model}, {shape[0]} x {shape[1]}, {baseline.name}")
    print(f"means of {width} steps; up to step, needle, PyTorch, difference")
    for i in range(0, len(ours), max(args.steps // 50, 1)):
        print(f"{i + width:6} {ours[i]:8.4f} {theirs[i]:8.4f} {ours[i] - theirs[i]:+8.4f}")
    worst = np.abs(ours - theirs).max()
    print(f"the largest difference of the smoothed losses: {worst:.4f} (at most {NEAR})")
    return int(worst > NEAR)


if __name__ == "__main__":
    bench.run(main)
