#!/usr/bin/env python3
"""A model of one's own, trained, saved and resumed by the same loop as Pythia: RMSNorm (Zhang and
Sennrich 2019), a gated MLP (Shazeer 2020), rotary attention, a tied head.

    python examples/own_model.py --model own --steps 300      flags as of apps/train_pythia.py
    python examples/own_model.py --resume auto --name own
    needle train --import examples/own_model.py --model own       the same; so generate, evaluate

`register` is all that needle asks for: checkpoints name the model, its presets are names for
--model, `hook_points` say where hooks stand, and generation attends through the cache that `hidden`
hands on; learned positions come from `positions_of`. Axis letters: B batch, T time, C features.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # with --import needle is there already
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "apps"))
    import train_pythia  # it finds the needle of this checkout

from needle import init, nn, ops  # noqa: E402
from needle.autograd import Tensor  # noqa: E402
from needle.backend_ndarray import Device, NDArray, array  # noqa: E402
from needle.generation import Cache  # noqa: E402
from needle.models import Config, LanguageModel, register  # noqa: E402
from needle.processes import program  # noqa: E402


@dataclass(frozen=True)
class OwnConfig(Config):
    vocab_size: int = 4096
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    max_seq_len: int = 256
    dtype: str = "float32"

    @classmethod
    def presets(cls) -> dict[str, dict]:
        return {"own": {}, "own-wide": {"hidden_size": 384, "num_heads": 12}}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32."""

    hook_points = {"hook_normalized": None, "hook_out": None}

    def __init__(self, size: int, device: Device, dtype: str, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(init.ones(size, device=device, dtype=dtype)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = ops.astype(x, "float32")
        square = ops.mean(wide * wide, -1).reshape((*x.shape[:-1], 1))
        y = self.hook("hook_normalized", wide / ops.sqrt(square + self.eps))
        return self.hook("hook_out", ops.astype(y, x.dtype) * self.weight)


class GatedMLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    hook_points = {"hook_post": None}

    def __init__(self, size: int, device: Device, dtype: str) -> None:
        super().__init__()
        inner, std = 8 * size // 3, (2 / (5 * size)) ** 0.5
        self.gate = nn.Linear(size, inner, False, device, dtype, std)
        self.up = nn.Linear(size, inner, False, device, dtype, std)
        self.down = nn.Linear(inner, size, False, device, dtype, std / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hook("hook_post", ops.gelu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    hook_points = {"hook_resid_pre": None, "ln1": "norm1", "attn": "attention"}
    hook_points |= {"ln2": "norm2", "mlp": "mlp", "hook_resid_post": None}

    def __init__(self, config: OwnConfig, device: Device) -> None:
        super().__init__()
        size, place, std = config.hidden_size, (device, config.dtype), config.hidden_size**-0.5
        self.norm1, self.norm2 = RMSNorm(size, *place), RMSNorm(size, *place)
        self.attention = nn.Attention(size, config.num_heads, False, *place, std / 2, std / 4)
        self.mlp = GatedMLP(size, *place)

    def forward(self, x: Tensor, rotary: tuple, cache: nn.attention.Cached | None) -> Tensor:
        x = self.hook("hook_resid_pre", x)
        x = x + self.attention(self.norm1(x), rotary, cache=cache)
        return self.hook("hook_resid_post", x + self.mlp(self.norm2(x)))


@register("own")
class OwnModel(LanguageModel):
    config_class = OwnConfig
    hook_points = {"hook_embed": None, "blocks": "layers", "ln_final": "norm"}

    def __init__(self, config: OwnConfig, device: Device | None = None) -> None:
        super().__init__(config, device)
        size, place = config.hidden_size, (self.device, config.dtype)
        self.embedding = nn.Embedding(config.vocab_size, size, *place, std=size**-0.5)
        self.layers = [Layer(config, self.device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(size, *place)
        self.embed_out = nn.TiedHead(self.embedding)
        tables = nn.rotary_tables(config.max_seq_len, size // config.num_heads)
        self._rotary = tuple(array(table, "float32", self.device) for table in tables)

    def hidden(self, ids: NDArray, cache: Cache | None = None) -> Tensor:
        x = self.hook("hook_embed", self.embedding(ids))
        for i, layer in enumerate(self.layers):
            x = layer(x, self._rotary, cache and cache.layer(i))
        return self.norm(x)


if __name__ == "__main__":
    sys.exit(program(train_pythia.main))
