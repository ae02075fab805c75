"""Activation patching of all heads and positions of a prompt, needle against TransformerLens, in
one process, interleaved, on one random Pythia.

A sample of needle is get_act_patch_attn_head_out_by_pos as a whole. TransformerLens runs the same
patches one after another, each as long as any other, so that a sample of it is `--patches` of them,
spread over the layers, times their number. The metric reads the logits of the last position; needle
is timed with all logits and with those alone (`logits_at=[-1]`). Both sides' results are compared.

    python benchmarks/patching.py                                  on a GPU, else on the CPU
    python benchmarks/patching.py --device cpu --rounds 3
"""

from __future__ import annotations

import statistics
import tempfile

import bench
import numpy as np

import needle as ndl
from needle import patching
from needle.models.pythia import Pythia, PythiaConfig


def their_model(model: Pythia, device: str):
    import torch
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).to(device)
        made = TransformerBridge.boot_transformers(folder, hf_model=loaded, device=device)
    made.enable_compatibility_mode(no_processing=True)
    return made


def main() -> int:
    made = bench.parser(
        __doc__,
        ("--tokens", 32, "N", "of the prompt"),
        ("--rounds", 5, "N", "samples of each side"),
        ("--patches", 24, "N", "that TransformerLens runs in a sample"),
        ("--device", "auto", "NAME", "auto, cpu or cuda"),
        bench.MODEL,
    )
    args = made.parse_args()
    gpu = args.device == "cuda" or (args.device == "auto" and ndl.cuda().enabled())
    device = bench.need_gpu() if gpu else ndl.cpu()
    np.random.seed(0)
    model = Pythia(PythiaConfig.preset(args.model), device)
    config = model.config
    clean, corrupted = np.random.randint(0, config.vocab_size, (2, 1, args.tokens), np.int32)
    _, cache = model.run_with_cache(clean, lambda name: name.endswith("hook_z"))
    shape = (config.num_layers, args.tokens, config.num_heads)
    count = int(np.prod(shape))

    def metric(logits):
        return logits[0, -1, 3] - logits[0, -1, 5]

    def ours(**options):
        run = patching.get_act_patch_attn_head_out_by_pos
        return run(model, corrupted, cache, metric, **options).numpy()

    sides = {
        "needle": lambda: bench.seconds(ours),
        "needle, last logits": lambda: bench.seconds(lambda: ours(logits_at=[-1])),
    }
    if bench.has("torch", "transformers", "transformer_lens"):
        import torch

        theirs = their_model(model, "cuda" if gpu else "cpu")
        ids = [torch.from_numpy(x).long().to(theirs.cfg.device) for x in (clean, corrupted)]
        with torch.no_grad():
            _, kept = theirs.run_with_cache(ids[0])
        places = np.stack(
            np.unravel_index(np.linspace(0, count - 1, args.patches, dtype=int), shape)
        )

        def some() -> np.ndarray:
            found = []
            with torch.no_grad():
                for layer, at, head in places.T:
                    name = f"blocks.{layer}.attn.hook_z"

                    def patch(z, hook, at=at, head=head):
                        z[:, at, head] = kept[hook.name][:, at, head]
                        return z

                    found.append(metric(theirs.run_with_hooks(ids[1], fwd_hooks=[(name, patch)])))
            return torch.stack(found).cpu().numpy()

        both = ours(), ours(logits_at=[-1])
        for found in both:
            np.testing.assert_allclose(found[tuple(places)], some(), rtol=0, atol=1e-3)
        sides["TransformerLens"] = lambda: bench.seconds(some) * count / args.patches
    bench.load(lambda: ours(logits_at=[-1]), 3.0)
    samples = bench.in_turns(sides, args.rounds)
    print(f"{count:,} patches of {args.model}, {args.tokens} tokens, {bench.describe(device)}")
    for name, seconds in samples.items():
        line = f"{name:20} {bench.spread(seconds, '.3f')} s"
        if "TransformerLens" in samples and name != "TransformerLens":
            slower = statistics.median(samples["TransformerLens"]) / statistics.median(seconds)
            line += f"   {slower:.1f} x as fast"
        print(line)
    return 0


if __name__ == "__main__":
    bench.run(main)
