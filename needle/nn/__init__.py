"""Modules, parameters and layers."""

from .basic import (
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
from .flat import FlatParameters, flatten_parameters, is_decayed
from .module import Module, Parameter
from .transformer import AttentionLayer, MultiHeadAttention, Transformer, TransformerLayer

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
