"""Modules, parameters and layers."""

from needle.nn import basic, functional, init
from needle.nn.attention import Attention, rotary_tables
from needle.nn.basic import *  # noqa: F403
from needle.nn.flat import FlatParameters, flatten_parameters, is_decayed, place_neighbours
from needle.nn.module import Module, Parameter, fuses_as
from needle.nn.recomputed import recompute
from needle.nn.transformer import AttentionLayer, MultiHeadAttention, Transformer, TransformerLayer

# PyTorch's names of the same.
LayerNorm, CrossEntropyLoss = basic.LayerNorm1d, basic.SoftmaxLoss
ParameterList, ParameterDict = basic.ModuleList, basic.ModuleDict

__all__ = [
    "Attention", "AttentionLayer", "CrossEntropyLoss", "FlatParameters", "LayerNorm", "Module",
    "MultiHeadAttention", "Parameter", "ParameterDict", "ParameterList", "Transformer",
    "TransformerLayer", "flatten_parameters", "functional", "fuses_as", "init", "is_decayed",
    "place_neighbours", "recompute", "rotary_tables",
]  # fmt: skip
__all__ += basic.__all__
