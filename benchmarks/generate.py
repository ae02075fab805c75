"""Tokens a second of greedy generation, needle against transformers, in one process, interleaved.

A sample is one whole call of generate: a prompt of random tokens, prefill, then the new tokens, all
read back on the host. Neither side stops early. The weights are those of one random model.

    python benchmarks/generate.py               on a GPU pythia-70m in bfloat16, batch 1 and 32
    python benchmarks/generate.py --baseline eager --batch-size 8           without torch.compile

`--baseline compiled` (the default on a GPU) is generate with a static cache, which compiles its
decoding step; `eager` has the growing cache. Without torch and transformers only needle is timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import bench
import numpy as np

import needle as ndl
from needle.models.pythia import Pythia, PythiaConfig

Side = Callable[[np.ndarray], np.ndarray]  # prompts (B, T) -> prompts and new tokens


def transformers_side(model: Pythia, args: argparse.Namespace) -> Side:
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        baseline = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    baseline = baseline.to(args.device).eval()
    options = dict.fromkeys(("max_new_tokens", "min_new_tokens"), args.new_tokens)
    options |= {"do_sample": False, "pad_token_id": 0}
    if args.baseline == "compiled":
        options["cache_implementation"] = "static"

    def run(prompt: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(prompt).to(args.device)
        with torch.no_grad():
            out = baseline.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out.cpu().numpy()

    return run


# Values that no flag gives: model, batch size, new tokens, samples, baseline.
DEFAULTS = {
    "cuda": ("pythia-70m", [1, 32], 256, 7, "compiled"),
    "cpu": ("pythia-14m", [1, 4], 32, 3, "eager"),
}


def main() -> None:
    parser = bench.parser(
        __doc__,
        ("--model", str, "NAME", ""),
        ("--prompt", 128, "N", "tokens of each prompt"),
        ("--new-tokens", int, "N", ""),
        ("--samples", int, "N", "calls of each side"),
        ("--batch-size", [int], "B", ""),
        bench.DEVICE,
        bench.DTYPE,
        ("--baseline", str, None, "", "compiled", "eager", "none"),
    )
    args = parser.parse_args()
    device = bench.device_of(args)
    names = ("model", "batch_size", "new_tokens", "samples", "baseline")
    for name, value in zip(names, DEFAULTS[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)

    np.random.seed(0)
    model = Pythia(PythiaConfig.preset(args.model), device=device, dtype=args.dtype)
    sides = {"needle": lambda prompt: model.generate(prompt, args.new_tokens, temperature=0.0)}
    versions = f"needle {ndl.__version__}"
    if args.baseline != "none" and bench.has("torch", "transformers"):
        import torch
        import transformers

        sides[f"transformers {args.baseline}"] = transformers_side(model, args)
        versions += f", torch {torch.__version__}, transformers {transformers.__version__}"
    print(bench.describe(device))
    print(versions)
    print(
        f"{args.model}, {args.dtype}, prompt {args.prompt}, {args.new_tokens} new tokens, "
        f"greedy, {args.samples} calls a side, interleaved"
    )
    print(
        f"{'':24}{'batch':>6}{'ms median':>11}{'min':>9}{'max':>9}{'us/step':>9}{'tok/s':>10}"
        f"{'needle x':>10}"
    )
    rng = np.random.default_rng(0)
    for batch in args.batch_size:
        prompt = rng.integers(0, model.config.vocab_size, (batch, args.prompt))
        for run in [*sides.values()] * 2:  # compiles, then warms up
            run(prompt)
        calls = {
            name: lambda run=run, prompt=prompt: bench.seconds(lambda: run(prompt))
            for name, run in sides.items()
        }
        seconds = bench.in_turns(calls, args.samples)
        own = statistics.median(seconds["needle"])
        for name, times in seconds.items():
            median = statistics.median(times)
            print(
                f"{name:24}{batch:6}{median * 1e3:11.2f}{min(times) * 1e3:9.2f}"
                f"{max(times) * 1e3:9.2f}{median / args.new_tokens * 1e6:9.1f}"
                f"{batch * args.new_tokens / median:10,.0f}{median / own:10.2f}"
            )


if __name__ == "__main__":
    bench.run(main)
