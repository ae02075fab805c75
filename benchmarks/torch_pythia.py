"""Baseline of the training benchmark: GPT-NeoX in plain PyTorch, as a good user would write it.

Scaled-dot-product attention, one projection for q, k and v, biases, parallel residual, the tanh
GELU and AdamW with decay on matrices only: the work of needle.models.Pythia, line for line.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, rotary: int) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.norm_attention = nn.LayerNorm(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated, rest = x[..., : self.rotary], x[..., self.rotary :]
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, rest), dim=-1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, time, width)
        hidden = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + self.dense(attended) + self.down(hidden)


class TorchPythia(nn.Module):
    """(B, T) ids and targets -> mean cross-entropy."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, time: int) -> None:
        super().__init__()
        rotary = width // heads // 4
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, rotary) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=math.sqrt(2 / (5 * width)))
        frequency = 10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary)
        angle = torch.outer(torch.arange(time).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def optimizer(self, lr: float) -> torch.optim.AdamW:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
