"""Modules, parameters and layers."""

from needle.nn import functional, init
from needle.nn.attention import Attention, rotary_tables
from needle.nn.basic import (
    ELU,
    GELU,
    BatchNorm1d,
    BCELoss,
    BCEWithLogitsLoss,
    Dropout,
    Embedding,
    Flatten,
    Identity,
    KLDivLoss,
    L1Loss,
    LayerNorm1d,
    LeakyReLU,
    Linear,
    LogSoftmax,
    ModuleDict,
    ModuleList,
    MSELoss,
    ReLU,
    Residual,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    SoftmaxLoss,
    Softplus,
    SwiGLU,
    Tanh,
    TiedHead,
)
from needle.nn.flat import FlatParameters, flatten_parameters, is_decayed, place_neighbours
from needle.nn.module import Module, Parameter, fuses_as
from needle.nn.recomputed import recompute
from needle.nn.transformer import AttentionLayer, MultiHeadAttention, Transformer, TransformerLayer

# PyTorch's names of the same.
LayerNorm, CrossEntropyLoss = LayerNorm1d, SoftmaxLoss
ParameterList, ParameterDict = ModuleList, ModuleDict

__all__ = [
    "Attention", "AttentionLayer", "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d",
    "CrossEntropyLoss", "Dropout", "ELU", "Embedding", "FlatParameters", "Flatten", "GELU",
    "Identity", "KLDivLoss", "L1Loss", "LayerNorm", "LayerNorm1d", "LeakyReLU", "Linear",
    "LogSoftmax", "MSELoss", "Module", "ModuleDict", "ModuleList", "MultiHeadAttention",
    "Parameter", "ParameterDict", "ParameterList", "RMSNorm", "ReLU", "Residual", "Sequential",
    "SiLU", "Sigmoid", "Softmax", "SoftmaxLoss", "Softplus", "SwiGLU", "Tanh", "TiedHead",
    "Transformer", "TransformerLayer", "flatten_parameters", "functional", "fuses_as", "init",
    "is_decayed", "place_neighbours", "recompute", "rotary_tables",
]  # fmt: skip
