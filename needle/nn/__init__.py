"""Modules, parameters and layers."""

from needle.nn.attention import Attention, rotary_tables
from needle.nn.basic import (
    GELU,
    BatchNorm1d,
    Dropout,
    Embedding,
    Flatten,
    Identity,
    LayerNorm1d,
    Linear,
    ReLU,
    Residual,
    Sequential,
    SoftmaxLoss,
    TiedHead,
)
from needle.nn.flat import FlatParameters, flat_again, flatten_parameters, is_decayed
from needle.nn.module import Module, Parameter
from needle.nn.recomputed import recompute
from needle.nn.transformer import AttentionLayer, MultiHeadAttention, Transformer, TransformerLayer

__all__ = [
    "GELU",
    "Attention",
    "AttentionLayer",
    "BatchNorm1d",
    "Dropout",
    "Embedding",
    "FlatParameters",
    "Flatten",
    "Identity",
    "LayerNorm1d",
    "Linear",
    "Module",
    "MultiHeadAttention",
    "Parameter",
    "ReLU",
    "Residual",
    "Sequential",
    "SoftmaxLoss",
    "TiedHead",
    "Transformer",
    "TransformerLayer",
    "flatten_parameters",
    "is_decayed",
    "recompute",
    "rotary_tables",
]
