"""Makes the golden numbers that tests/models/test_pythia.py compares needle with.

Needs torch, transformers and safetensors; the tests themselves need none of the first two. Run

    python tests/models/golden/make_golden.py

after a change of the configurations below. Everything is computed in float64 by transformers'
GPTNeoXForCausalLM and torch.optim.AdamW, and stored in float32. Names are GPT-NeoX's own without
the `gpt_neox.` prefix, weights in torch's orientation (out, in).

gpt_neox.safetensors   weights/NAME, ids, targets, and for each variant of the configuration
                       VARIANT/logits, VARIANT/grads/NAME
gpt_neox.json          the configuration, the loss of each variant, and a training trace: losses and
                       gradient norms of ten AdamW steps (decay on matrices, clipped at norm 1)
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

HERE = Path(__file__).resolve().parent

# An odd vocabulary, heads of 16 of which rotary turns 4 and leaves 12, and an inner size that is
# not 4 x hidden, so that no two axes can be confused.
CONFIG = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 56,
    "rotary_pct": 0.25,
    "rotary_base": 10000,
    "layer_norm_eps": 1e-5,
    "max_seq_len": 24,
}
BATCH, TIME = 2, 13
VARIANTS = {
    "erf_parallel": {"hidden_act": "gelu", "use_parallel_residual": True},
    "erf_sequential": {"hidden_act": "gelu", "use_parallel_residual": False},
    "tanh_parallel": {"hidden_act": "gelu_new", "use_parallel_residual": True},
    "tanh_sequential": {"hidden_act": "gelu_new", "use_parallel_residual": False},
}
TRACE = {
    "variant": "tanh_parallel",
    "lr": 1e-2,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_norm": 1.0,
    "steps": 10,
}


def build(variant: str) -> GPTNeoXForCausalLM:
    config = GPTNeoXConfig(
        vocab_size=CONFIG["vocab_size"],
        hidden_size=CONFIG["hidden_size"],
        num_hidden_layers=CONFIG["num_layers"],
        num_attention_heads=CONFIG["num_heads"],
        intermediate_size=CONFIG["intermediate_size"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": CONFIG["rotary_base"],
            "partial_rotary_factor": CONFIG["rotary_pct"],
        },
        layer_norm_eps=CONFIG["layer_norm_eps"],
        max_position_embeddings=CONFIG["max_seq_len"],
        attn_implementation="eager",
        **VARIANTS[variant],
    )
    return GPTNeoXForCausalLM(config).double().train()


def short(name: str) -> str:
    return name.removeprefix("gpt_neox.").replace("lm_head.", "embed_out.")


def weights(model: GPTNeoXForCausalLM) -> dict[str, torch.Tensor]:
    """Large enough that every part matters; biases and norms are off their defaults."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = "norm" in name and name.endswith("weight")
        made[name] = (1 + 0.2 * draw if is_norm else 0.25 * draw).float()
    return made


def set_weights(model: GPTNeoXForCausalLM, made: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made[name].double())


def loss_of(model: GPTNeoXForCausalLM, ids: torch.Tensor, targets: torch.Tensor):
    logits = model(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return logits, loss


def trace(made: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor) -> dict:
    model = build(TRACE["variant"])
    set_weights(model, made)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": TRACE["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=TRACE["lr"],
        betas=tuple(TRACE["betas"]),
        eps=TRACE["eps"],
    )
    losses, norms = [], []
    for _ in range(TRACE["steps"]):
        optimizer.zero_grad()
        _, loss = loss_of(model, ids, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), TRACE["max_norm"])
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return {**TRACE, "losses": losses, "norms": norms}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made = weights(build("erf_parallel"))
    ids = torch.randint(CONFIG["vocab_size"], (BATCH, TIME))
    targets = torch.randint(CONFIG["vocab_size"], (BATCH, TIME))
    tensors = {f"weights/{short(name)}": value for name, value in made.items()}
    tensors["ids"], tensors["targets"] = ids.int(), targets.int()
    losses = {}
    for variant in VARIANTS:
        model = build(variant)
        set_weights(model, made)
        logits, loss = loss_of(model, ids, targets)
        loss.backward()
        losses[variant] = loss.item()
        tensors[f"{variant}/logits"] = logits.detach().float()
        for name, parameter in model.named_parameters():
            tensors[f"{variant}/grads/{short(name)}"] = parameter.grad.float()
    save_file({k: v.contiguous() for k, v in tensors.items()}, HERE / "gpt_neox.safetensors")
    facts = {
        "config": CONFIG,
        "variants": VARIANTS,
        "losses": losses,
        "trace": trace(made, ids, targets),
    }
    (HERE / "gpt_neox.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
