"""Pythia (Biderman et al. 2023): GPT-NeoX (Black et al. 2022) to the letter.

    x = embed_in[ids]                                                   (B, T, C)
    each layer:  x = x + attention(norm1(x)) + mlp(norm2(x))            parallel residual
             or  x = x + attention(norm1(x));  x = x + mlp(norm2(x))    sequential
             or  x = x + attention(norm1(x))                            attention_only
    logits = final_layer_norm(x) @ embed_out                            (B, T, V), untied head
                                        unless tie_word_embeddings: embed_in transposed

Attention packs q, k and v per head: the output axis of query_key_value is [head 0: q k v][head 1:
q k v]..., so that (B, T, H, 3, D) is a view of it. Rotary rotates the first quarter of each head.

Parameters carry GPT-NeoX's names without the `gpt_neox.` prefix. Linear weights are (in, out), the
transpose of Hugging Face's. Axis letters: B batch, T time, C channels, H heads, D head dim, V
vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import warnings
from typing import Any

from needle import hf, init, nn, ops
from needle.autograd import Tensor
from needle.backend_ndarray import FLOAT_DTYPES, Device, NDArray, array
from needle.block_mask import BlockMask
from needle.generation import Cache
from needle.interp.factored import FactoredWeights
from needle.models import gpt_neox
from needle.models.language import LanguageModel
from needle.models.pretrained import from_pretrained
from needle.models.registry import Config, register
from needle.ops.common import LARGEST
from needle.ops.fp8 import whole_sizes

FP8_LAYERS_FROM = 512  # the width from which products of layers in FP8 save more than they cost
SPARSE_PATTERNS = ("mixed", "local", "strided", "global", "dense")
# Hugging Face's names of the two forms; the three tanh names differ only in how they compute it.
TANH = ("gelu_new", "gelu_fast", "gelu_tanh", "gelu_pytorch_tanh")
ACTIVATIONS = {"gelu": "none", **dict.fromkeys(TANH, "tanh")}
CHOICES = {"hidden_act": [*ACTIVATIONS], "dtype": FLOAT_DTYPES, "sparse_pattern": SPARSE_PATTERNS}

# name: layers, hidden size, heads, vocabulary. `tiny` is not of the suite: it is what a CPU trains
# in minutes.
PRESETS = {
    "tiny": (4, 192, 6, 4096),
    "pythia-14m": (6, 128, 4, 50304),
    "pythia-31m": (6, 256, 8, 50304),
    "pythia-70m": (6, 512, 8, 50304),
    "pythia-160m": (12, 768, 12, 50304),
    "pythia-410m": (24, 1024, 16, 50304),
    "pythia-1b": (16, 2048, 8, 50304),
    "pythia-1.4b": (24, 2048, 16, 50304),
    "pythia-2.8b": (32, 2560, 32, 50304),
    "pythia-6.9b": (32, 4096, 32, 50432),
    "pythia-12b": (36, 5120, 40, 50688),
}


# ---- configuration ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PythiaConfig(Config):
    """The shape of a model. `hidden_act` as Hugging Face names it: "gelu" is the erf form, which
    the published configurations say; "gelu_new" the tanh form, with which Pythia was trained."""

    vocab_size: int = 50304
    hidden_size: int = 512
    num_layers: int = 6
    num_heads: int = 8
    intermediate_size: int = 0  # 0: 4 x hidden_size
    max_seq_len: int = 2048
    rotary_pct: float = 0.25
    rotary_base: float = 10000.0
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu_new"
    use_parallel_residual: bool = True
    tie_word_embeddings: bool = False  # the head multiplies by the embedding, transposed
    dtype: str = "float32"
    use_sparse_attention: bool = False
    sparse_pattern: str = "mixed"  # the window and the first block
    # Keys each query sees back; of "strided" the stride. 0: a quarter of max_seq_len, a block at
    # least.
    sparse_window: int = 0
    sparse_block: int = 64
    attention_only: bool = False  # no MLPs: x = x + attention(norm1(x)) is all of a layer

    def __post_init__(self) -> None:
        for field in dataclasses.fields(PythiaConfig):  # a subclass has rules of its own for others
            value = getattr(self, field.name)
            if rule := _broken_rule(field, value):
                raise ValueError(f"PythiaConfig: {field.name} must be {rule}, not {value!r:.40}")
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if not self.sparse_window:
            window = max(self.max_seq_len // 4, self.sparse_block)
            object.__setattr__(self, "sparse_window", window if self.use_sparse_attention else 256)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"PythiaConfig: hidden_size {self.hidden_size} is not a multiple of "
                f"num_heads {self.num_heads}"
            )
        if self.rotary_pct > 1:
            raise ValueError(f"PythiaConfig: rotary_pct must be at most 1, not {self.rotary_pct}")
        if self.rotary_dims % 2:
            fits = (n for n in itertools.count(self.head_dim) if int(n * self.rotary_pct) % 2 == 0)
            raise ValueError(
                f"PythiaConfig: rotary_pct {self.rotary_pct} rotates {self.rotary_dims} of "
                f"{self.head_dim} dimensions (hidden_size / num_heads); it must be an even number: "
                f"hidden_size {next(fits) * self.num_heads} fits"
            )

    @classmethod
    def presets(cls) -> dict[str, dict[str, int]]:
        fields = ("num_layers", "hidden_size", "num_heads", "vocab_size")
        return {name: dict(zip(fields, values)) for name, values in PRESETS.items()}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PythiaConfig:
        """A model of the suite by name ("pythia-70m", or "70m"), with fields changed.

        >>> config = ndl.PythiaConfig.preset("70m", dtype="bfloat16")
        >>> config.num_layers, config.hidden_size, config.num_heads, config.dtype
        (6, 512, 8, 'bfloat16')
        """
        return super().preset(f"pythia-{name}" if f"pythia-{name}" in PRESETS else name, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; attention_only only where it is True."""
        fields = super().to_dict()
        if not self.attention_only:
            del fields["attention_only"]  # the bytes of other files stay as they are
        return fields

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.rotary_pct)

    # TransformerLens' and Hugging Face's names of the same.
    n_layers = property(lambda self: self.num_layers)
    n_heads = property(lambda self: self.num_heads)
    d_model = property(lambda self: self.hidden_size)
    d_head = property(lambda self: self.head_dim)
    d_mlp = property(lambda self: self.intermediate_size)
    n_ctx = property(lambda self: self.max_seq_len)
    d_vocab = property(lambda self: self.vocab_size)
    num_hidden_layers = property(lambda self: self.num_layers)
    num_attention_heads = property(lambda self: self.num_heads)


def _broken_rule(field: dataclasses.Field, value: Any) -> str:
    """Return what a field of PythiaConfig must be and is not, or ""."""
    is_bool, positive = isinstance(value, bool), field.name == "rotary_base"
    is_number = isinstance(value, (int, float)) and not is_bool
    if field.type == "bool":
        return "" if is_bool else "True or False"  # "false" would be true
    if field.type == "str":
        allowed = CHOICES[field.name]
        return "" if value in allowed else f"one of {', '.join(allowed)}"
    if field.type == "int":
        least = 0 if field.default == 0 else 1
        fits = is_number and isinstance(value, int) and least <= value < 2**63
        return "" if fits else "an int of 1 to 2^63 - 1"
    fits = is_number and 0 <= value <= LARGEST and not (positive and value == 0)
    return "" if fits else f"a finite float32 {'above' if positive else 'of at least'} 0"


# ---- parts ------------------------------------------------------------------------------------


def initial_stds(config: PythiaConfig) -> tuple[float, float]:
    """Standard deviations of Pythia's start: "small init" (Nguyen and Salazar 2019) for what reads
    the residual stream, Wang's 2 / (L sqrt(C)) for what writes into it."""
    width = config.hidden_size
    return math.sqrt(2 / (5 * width)), 2 / (config.num_layers * math.sqrt(width))


class MLP(nn.Module):
    """C -> 4 C -> C with GELU between."""

    fuses = True
    hook_points = {"hook_pre": None, "hook_post": None}

    def __init__(self, config: PythiaConfig, device: Device | None) -> None:
        super().__init__()
        small, wang = initial_stds(config)
        width, inner, place = config.hidden_size, config.intermediate_size, (device, config.dtype)
        self.approximate = ACTIVATIONS[config.hidden_act]
        self.dense_h_to_4h = nn.Linear(width, inner, True, *place, std=small)
        self.dense_4h_to_h = nn.Linear(inner, width, True, *place, std=wang)

    W_in = property(lambda self: self.dense_h_to_4h.weight, doc="(C, F)")
    b_in = property(lambda self: self.dense_h_to_4h.bias, doc="(F,)")
    W_out = property(lambda self: self.dense_4h_to_h.weight, doc="(F, C)")
    b_out = property(lambda self: self.dense_4h_to_h.bias, doc="(C,)")

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """residual, of x's shape, is added."""
        up, down = self.dense_h_to_4h, self.dense_4h_to_h
        plain = all(nn.fuses_as(one, nn.Linear) and one.bias is not None for one in (up, down))
        if plain and not self.is_hooked_at(*self.hook_points):
            weights = up.weight, up.bias, down.weight, down.bias
            return ops.gelu_mlp(x, *weights, self.approximate, residual)
        x = self.hook("hook_pre", up(x))
        x = self.hook("hook_post", ops.gelu(x, self.approximate))
        if residual is None:
            return down(x)
        return down(x, residual=residual) if plain else residual + down(x)


class Layer(nn.Module):
    fuses = True
    hook_points = {
        "hook_resid_pre": None,
        "ln1": "input_layernorm",
        "attn": "attention",
        "hook_attn_out": None,
        "hook_resid_mid": None,
        "ln2": "post_attention_layernorm",
        "mlp": "mlp",
        "hook_mlp_out": None,
        "hook_resid_post": None,
    }
    neighbours = (("attention.dense.weight", "mlp.dense_4h_to_h.weight"),)  # of one product

    def __init__(self, config: PythiaConfig, device: Device | None) -> None:
        super().__init__()
        width, place = config.hidden_size, (device, config.dtype)
        self.parallel = config.use_parallel_residual
        absent = {"hook_resid_mid"} if self.parallel else set()  # nothing is in between
        if config.attention_only:
            absent = {"hook_resid_mid", "ln2", "mlp", "hook_mlp_out"}
        self.hook_points = {n: a for n, a in self.hook_points.items() if n not in absent}
        self.input_layernorm = nn.LayerNorm1d(width, config.layer_norm_eps, *place)
        if not config.attention_only:
            self.post_attention_layernorm = nn.LayerNorm1d(width, config.layer_norm_eps, *place)
        stds = initial_stds(config)
        self.attention = nn.Attention(width, config.num_heads, True, *place, *stds)
        self.mlp = None if config.attention_only else MLP(config, device)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[NDArray, NDArray],
        mask: BlockMask | None = None,
        cache: nn.attention.Cached | None = None,
        fp8: bool = False,
        recompute: bool = False,
    ) -> Tensor:
        """The layer as one operation, or part by part where something is hooked in, replaced or
        shared. fp8, recompute: as in ops.layer; the parts know no FP8."""
        weights = self.weights_of_one_operation()
        # Attention refuses a mask over a cache.
        if weights is None or not (cache is None or (mask is None and self._has_joined_weights())):
            if recompute:
                return nn.recompute(self, x, rotary, mask)
            return self._by_parts(x, rotary, mask, cache)
        if self._hooks is not None:
            x = self.hook("hook_resid_pre", x)
        heads, eps = self.attention.heads, self.input_layernorm.eps
        form = self.mlp.approximate
        if cache is None:
            cos, sin = rotary[0][: x.shape[1]], rotary[1][: x.shape[1]]
            y = ops.layer(x, *weights, heads, cos, sin, eps, form, mask, fp8, recompute)
        else:
            arrays = [weight.cached_data for weight in weights]
            found = ops.cached_layer(cache, x.cached_data, arrays, heads, *rotary, eps, form)
            y = Tensor.from_ndarray(found)
        return y if self._hooks is None else self.hook("hook_resid_post", y)

    def _by_parts(
        self,
        x: Tensor,
        rotary: tuple[NDArray, NDArray],
        mask: BlockMask | None,
        cache: nn.attention.Cached | None,
    ) -> Tensor:
        seen = x = self.hook("hook_resid_pre", x)  # by the norms
        operands = self.input_layernorm(seen), rotary, mask, cache
        x = self._add("hook_attn_out", x, self.attention, *operands)
        if self.mlp is not None:
            if not self.parallel:
                seen = x = self.hook("hook_resid_mid", x)
            x = self._add("hook_mlp_out", x, self.mlp, self.post_attention_layernorm(seen))
        return self.hook("hook_resid_post", x)

    def weights_of_one_operation(self) -> tuple[Any, ...] | None:
        """Return the weights and biases in the order of ops.layer; None where that does not compute
        this: it takes a parallel residual, the classes of this file and of needle.nn, with biases,
        hooks on the residual stream alone, no parameter in two places."""
        attention, mlp = self.attention, self.mlp
        if not (self.parallel and type(attention) is nn.Attention and type(mlp) is MLP):
            return None
        norm1, norm2 = norms = self.input_layernorm, self.post_attention_layernorm
        linears = attention.query_key_value, attention.dense, mlp.dense_h_to_4h, mlp.dense_4h_to_h
        weights: list[Any] = []
        for kind, parts in (nn.LayerNorm1d, norms), (nn.Linear, linears):
            for part in parts:
                if type(part) is not kind or part.bias is None or part._hooks is not None:
                    return None
                weights += part.weight, part.bias
        if (
            attention._hooks is not None
            or mlp._hooks is not None
            or (self._hooks is not None and self.is_hooked_at("hook_attn_out", "hook_mlp_out"))
            or norm1.eps != norm2.eps
            or attention.group is not None
        ):
            return None
        return tuple(weights) if len(set(map(id, weights))) == 12 else None

    def _has_joined_weights(self) -> bool:
        """True if the last weights are neighbours in memory, so that a step copies none. Those of a
        copied model become so here."""
        first, last = self.attention.dense.weight, self.mlp.dense_4h_to_h.weight
        if first.cached_data.joined(last.cached_data) is None:
            nn.place_neighbours(self)
        return first.cached_data.joined(last.cached_data) is not None

    def _add(self, name: str, x: Tensor, part: nn.Module, *operands: Any) -> Tensor:
        """Return x + part(*operands), added by the part's last product unless it has a hook."""
        if not nn.fuses_as(part, nn.Attention, MLP) or self.is_hooked_at(name):
            return x + self.hook(name, part(*operands))
        return part(*operands, residual=x)


# ---- the model --------------------------------------------------------------------------------


@register("pythia")
class Pythia(FactoredWeights, LanguageModel):
    """A GPT-NeoX language model.

    `dtype` (default: the configuration's) is that of parameters and activations. `initialise=False`
    leaves matrices zero and draws no random number. `tokenizer`: set if the model was loaded with
    one; save_pretrained() writes it unless told otherwise.

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    >>> model = ndl.Pythia(config)
    >>> logits, loss = model([[1, 2, 3]], targets=[[2, 3, 4]])
    >>> logits.shape, loss.shape
    ((1, 3, 50), ())
    """

    config_class = PythiaConfig
    weight_mapping = gpt_neox
    hook_points = {"hook_embed": None, "blocks": "layers", "ln_final": "final_layer_norm"}
    recompute = False
    shares = True

    def __init__(
        self,
        config: PythiaConfig,
        device: Device | None = None,
        dtype: str | None = None,
        initialise: bool = True,
    ) -> None:
        super().__init__(config, device, dtype)
        if initialise:
            self._make()
        else:
            with init.meta_device():
                self._make()
            for parameter in self.parameters():
                parameter.cached_data = parameter.cached_data.compact()
        nn.place_neighbours(self)
        self._mask: tuple[Any, BlockMask] | None = None  # the last one, and what it is of
        mask = self.block_mask(self.config.max_seq_len)
        is_meant = mask is None or config.sparse_pattern == "dense"
        is_meta = not self.embed_in.weight.is_contiguous()
        if not (is_meant or is_meta) and mask.ideal_speedup == 1:
            warnings.warn(
                f"Pythia: sparse_window {config.sparse_window} and blocks of {mask.block} leave "
                f"out no key of {mask.T} tokens: attention is dense; take other sizes",
                stacklevel=2,
            )
        self.named_parameters()  # gives each its name, under which optimizers keep their state

    def _make(self) -> None:
        config, place = self.config, (self.device, self.config.dtype)
        small, _ = initial_stds(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size, *place, std=small)
        self.layers = [Layer(config, self.device) for _ in range(config.num_layers)]
        self.final_layer_norm = nn.LayerNorm1d(config.hidden_size, config.layer_norm_eps, *place)
        self.embed_out = (
            nn.TiedHead(self.embed_in)
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, False, *place, std=small)
        )
        tables = nn.rotary_tables(config.max_seq_len, config.rotary_dims, config.rotary_base)
        self._rotary = tuple(array(table, "float32", self.device) for table in tables)

    def hidden(self, ids: NDArray, cache: Cache | None = None, fp8: bool = False) -> Tensor:
        """fp8: compute the products of layers in FP8, of those that are one operation."""
        rotary, mask = (self._rotary, None) if cache else self._of_tokens(ids.shape[1])
        x = self.hook("hook_embed", self.embed_in(ids))
        for i, layer in enumerate(self.layers):
            if cache is not None:
                x = layer(x, rotary, mask, cache.layer(i))
            elif type(layer) is Layer:
                x = layer(x, rotary, mask, None, fp8, self.recompute)
            elif self.recompute:
                x = nn.recompute(layer, x, rotary, mask)
            else:
                x = layer(x, rotary, mask)
        return self.final_layer_norm(x)

    @property
    def layers_in_fp8(self) -> str:
        """Those that are one operation (ops.layer), from a width on at which it saves time; none
        of a subclass that writes its own hidden()."""
        config, own = self.config, type(self).hidden is not Pythia.hidden
        wide = config.hidden_size >= FP8_LAYERS_FROM and whole_sizes(config.intermediate_size)
        if own or not wide:
            return ""
        one = [type(x) is Layer and x.weights_of_one_operation() is not None for x in self.layers]
        if not any(one):
            return ""
        return "layers" if all(one) else f"{sum(one)} of {len(one)} layers"

    def hidden_from(self, x: Tensor, layer: int) -> Tensor:
        cls = type(self)
        if cls.hidden is not Pythia.hidden and cls.hidden_from is Pythia.hidden_from:
            return super().hidden_from(x, layer)
        rotary, mask = self._of_tokens(x.shape[1])
        for one in self.layers[layer:]:
            x = one(x, rotary, mask)
        return self.final_layer_norm(x)

    def _of_tokens(self, time: int) -> tuple[Any, BlockMask | None]:
        """Rotary tables of `time` tokens, and the mask of the sequences that they belong to."""
        if self.group is None:
            return self._rotary, self.block_mask(time)
        whole = time * self.group.size
        if whole > self.config.max_seq_len:
            raise ValueError(
                f"Pythia: {self.group.size} ranks share sequences of {whole} tokens, but "
                f"max_seq_len is {self.config.max_seq_len}"
            )
        runs = ops.ring_chunks(whole, self.group.rank, self.group.size)
        parts = ([Tensor.from_ndarray(table[run]) for run in runs] for table in self._rotary)
        return tuple(ops.concatenate(part).cached_data for part in parts), self.block_mask(whole)

    def block_mask(self, time: int) -> BlockMask | None:
        if not self.config.use_sparse_attention:
            return None
        of = self.config, time
        if self._mask is None or self._mask[0] != of:
            self._mask = of, sparse_mask(*of)
        return self._mask[1]

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike,
        device: Device | None = None,
        dtype: str | None = None,
        revision: str | None = None,
    ) -> Pythia:
        """Return the model of a run's folder, a checkpoint, a folder that `transformers` saved, or
        a name on the Hugging Face hub, as `models.from_pretrained` does, of this class.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> model.save_pretrained(folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'generation_config.json', 'model.safetensors']
        >>> ndl.Pythia.from_pretrained(folder, dtype="bfloat16").config.dtype
        'bfloat16'
        """
        return from_pretrained(path, device, dtype, revision, cls)

    def save_pretrained(self, folder: str | os.PathLike, tokenizer: Any = None) -> None:
        """Writes a folder that `transformers` opens: configuration, weights, and the tokenizer, as
        ndl.data.load_tokenizer takes it; where none is given, `self.tokenizer` with the special
        tokens that came with the model."""
        hf.save(self, folder, tokenizer)


def sparse_mask(config: PythiaConfig, time: int) -> BlockMask:
    """The block mask that the configuration describes, for sequences of `time` tokens: the corner
    of that of max_seq_len, so that a query sees the same keys however many tokens follow."""
    window, block = config.sparse_window, config.sparse_block
    length = min(-(-time // block) * block, max(time, config.max_seq_len))  # of whole blocks
    parts: dict[str, dict[str, int]] = {
        "local": {"window": window},
        "strided": {"stride": window},
        "global": {"n_global": block},
        "mixed": {"window": window, "n_global": block},
        "dense": {"n_global": length},
    }
    whole = BlockMask.mixed(length, **parts[config.sparse_pattern], block=block)
    return BlockMask(whole.blocks, block, time)


def create_pythia_70m(
    vocab_size: int = 50304,
    max_seq_len: int = 2048,
    use_sparse_attention: bool = False,
    device: Device | None = None,
    dtype: str = "float32",
    sparse: str | None = None,
    window: int = 0,
    block: int = 64,
) -> tuple[Pythia, PythiaConfig]:
    """Return a freshly initialised Pythia-70M and its configuration. sparse: a pattern of
    SPARSE_PATTERNS, which makes attention block-sparse, as use_sparse_attention does with "mixed".
    window: keys that a query sees back, by default a quarter of max_seq_len, and a block at least;
    of "strided" the stride. block: tokens of a block. Warns where no block is left out."""
    config = PythiaConfig.preset(
        "pythia-70m",
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        use_sparse_attention=use_sparse_attention or sparse is not None,
        sparse_pattern=sparse or "mixed",
        sparse_window=window,
        sparse_block=block,
        dtype=dtype,
    )
    return Pythia(config, device=device), config
