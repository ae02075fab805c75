"""Modules, parameters and layers."""

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
)
from needle.nn.flat import FlatParameters, flatten_parameters, is_decayed
from needle.nn.module import Module, Parameter
from needle.nn.transformer import AttentionLayer, MultiHeadAttention, Transformer, TransformerLayer

__all__ = [
    "GELU",
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
    "Transformer",
    "TransformerLayer",
    "flatten_parameters",
    "is_decayed",
]
