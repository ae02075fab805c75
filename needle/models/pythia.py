"""Pythia (Biderman et al. 2023): GPT-NeoX (Black et al. 2022) to the letter.

    x = embed_in[ids]                                                   (B, T, C)
    each layer:  x = x + attention(norm1(x)) + mlp(norm2(x))            parallel residual
             or  x = x + attention(norm1(x));  x = x + mlp(norm2(x))    sequential
    logits = final_layer_norm(x) @ embed_out                            (B, T, V), untied head
                                        unless tie_word_embeddings: embed_in transposed

Attention packs q, k and v per head: the output axis of query_key_value is [head 0: q k v][head 1:
q k v]..., so that (B, T, H, 3, D) is a view of it. Rotary turns the first quarter of each head.

Parameters carry GPT-NeoX's names without the `gpt_neox.` prefix. Linear weights are (in, out), the
transpose of Hugging Face's. Axis letters: B batch, T time, C channels, H heads, D head dim, V
vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from needle import generation, hooks, nn, ops
from needle.autograd import Tensor
from needle.backend_ndarray import Device, NDArray, array, default_device
from needle.block_mask import BlockMask

DTYPES = ("float32", "bfloat16", "float16")
SPARSE_PATTERNS = ("mixed", "local", "strided", "global", "dense")
# Hugging Face's names of the two forms; the three tanh names differ only in how they compute it.
ACTIVATIONS = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_tanh": "tanh",
    "gelu_pytorch_tanh": "tanh",
}

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


@dataclass(frozen=True)
class PythiaConfig:
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
    sparse_window: int = 256  # keys each query sees back; of "strided": the stride
    sparse_block: int = 64

    def __post_init__(self) -> None:
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "intermediate_size",
            "max_seq_len",
            "sparse_window",
            "sparse_block",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"PythiaConfig: {name} must be an int of 1 or more, not {value!r}")
        for name in ("rotary_pct", "rotary_base", "layer_norm_eps"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf or (name, value) == ("rotary_base", 0):
                raise ValueError(
                    f"PythiaConfig: {name} must be a finite number "
                    f"{'above' if name == 'rotary_base' else 'of at least'} 0, "
                    f"not {value!r}"
                )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"PythiaConfig: hidden_size {self.hidden_size} is not a multiple of "
                f"num_heads {self.num_heads}"
            )
        if not 0 <= self.rotary_pct <= 1 or self.rotary_dims % 2:
            raise ValueError(
                f"PythiaConfig: rotary_pct {self.rotary_pct} turns {self.rotary_dims} "
                f"of {self.head_dim} dimensions; it must be an even number of them"
            )
        for name, allowed in (
            ("hidden_act", tuple(ACTIVATIONS)),
            ("dtype", DTYPES),
            ("sparse_pattern", SPARSE_PATTERNS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"PythiaConfig: {name} must be one of {', '.join(allowed)}, "
                    f"not {getattr(self, name)!r}"
                )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PythiaConfig:
        """A model of the suite by name ("pythia-70m", or "70m"), with fields changed.

        >>> config = ndl.PythiaConfig.preset("70m", dtype="bfloat16")
        >>> config.num_layers, config.hidden_size, config.num_heads, config.dtype
        (6, 512, 8, 'bfloat16')
        """
        full = name if name in PRESETS else f"pythia-{name}"
        if full not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        layers, hidden, heads, vocabulary = PRESETS[full]
        config = cls(vocab_size=vocabulary, hidden_size=hidden, num_layers=layers, num_heads=heads)
        return dataclasses.replace(config, **changes)

    @classmethod
    def from_dict(cls, fields: dict) -> PythiaConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"PythiaConfig: unknown fields {', '.join(unknown)}")
        return cls(**fields)

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotary_dims(self) -> int:
        return int(self.head_dim * self.rotary_pct)

    # Hugging Face's names of the same.
    @property
    def num_hidden_layers(self) -> int:
        return self.num_layers

    @property
    def num_attention_heads(self) -> int:
        return self.num_heads

    @property
    def max_position_embeddings(self) -> int:
        return self.max_seq_len


# ---- parts ------------------------------------------------------------------------------------


class _Factory:
    """Makes parameters in the order of the calls. Values are NumPy's global stream in float64, so
    that np.random.seed gives the same model on every device and in every dtype."""

    def __init__(self, device, dtype: str, initialise: bool) -> None:
        self.device, self.dtype, self.initialise = device, dtype, initialise

    def normal(self, *shape: int, std: float) -> nn.Parameter:
        if not self.initialise:
            return self.constant(*shape, value=0.0)
        drawn = np.random.standard_normal(shape)
        drawn *= std
        return nn.Parameter(drawn, device=self.device, dtype=self.dtype)

    def constant(self, *shape: int, value: float) -> nn.Parameter:
        return nn.Parameter(np.full(shape, value, np.float32), device=self.device, dtype=self.dtype)


class Embedding(nn.Module):
    """ids (B, T) -> rows of `weight` (V, C)."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float, make: _Factory) -> None:
        super().__init__()
        self.weight = make.normal(vocab_size, hidden_size, std=std)

    def forward(self, ids: NDArray) -> Tensor:
        return ops.embedding(ids, self.weight)


class Linear(nn.Module):
    """x @ weight + bias over the last axis; weight (in, out), bias (out,) or none."""

    def __init__(
        self, inputs: int, outputs: int, std: float, make: _Factory, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = make.normal(inputs, outputs, std=std)
        self.bias = make.constant(outputs, value=0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class TiedHead(nn.Module):
    """x @ weight^T with the weight (V, C) of the embedding: no parameter of its own."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear_transposed(x, self.embedding.weight)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis."""

    def __init__(self, hidden_size: int, eps: float, make: _Factory) -> None:
        super().__init__()
        self.weight = make.constant(hidden_size, value=1.0)
        self.bias = make.constant(hidden_size, value=0.0)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


# (B, T, 3 C), q, k and v of a head after those of another -> (B, T, C), what the heads have seen.
Attend = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """What stands around attention: the projections before and behind `attend`."""

    def __init__(self, config: PythiaConfig, make: _Factory) -> None:
        super().__init__()
        width = config.hidden_size
        small, wang = initial_stds(config)
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.query_key_value = Linear(width, 3 * width, small, make)
        self.dense = Linear(width, width, wang, make)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.dense(attend(self.query_key_value(x)))


class MLP(nn.Module):
    """C -> 4 C -> C with GELU between."""

    def __init__(self, config: PythiaConfig, make: _Factory) -> None:
        super().__init__()
        small, wang = initial_stds(config)
        self.approximate = ACTIVATIONS[config.hidden_act]
        self.dense_h_to_4h = Linear(config.hidden_size, config.intermediate_size, small, make)
        self.dense_4h_to_h = Linear(config.intermediate_size, config.hidden_size, wang, make)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(ops.gelu(self.dense_h_to_4h(x), self.approximate))


class Layer(nn.Module):
    def __init__(self, config: PythiaConfig, make: _Factory) -> None:
        super().__init__()
        self.parallel = config.use_parallel_residual
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, make)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, make)
        self.attention = Attention(config, make)
        self.mlp = MLP(config, make)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        attended = self.attention(self.input_layernorm(x), attend)
        if self.parallel:
            return x + attended + self.mlp(self.post_attention_layernorm(x))
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def initial_stds(config: PythiaConfig) -> tuple[float, float]:
    """Standard deviations of Pythia's start: "small init" (Nguyen and Salazar 2019) for what reads
    the residual stream, Wang's 2 / (L sqrt(C)) for what writes into it."""
    width = config.hidden_size
    return math.sqrt(2 / (5 * width)), 2 / (config.num_layers * math.sqrt(width))


def parameter_shapes(config: PythiaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a model by name, without the model.

    >>> config = ndl.PythiaConfig.preset("12b")
    >>> ndl.models.pythia.parameter_shapes(config)["layers.35.mlp.dense_h_to_4h.weight"]
    (5120, 20480)
    """
    width, inner = config.hidden_size, config.intermediate_size
    layer: dict[str, tuple[int, ...]] = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layer |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    for linear, ins, outs in (
        ("attention.query_key_value", width, 3 * width),
        ("attention.dense", width, width),
        ("mlp.dense_h_to_4h", width, inner),
        ("mlp.dense_4h_to_h", inner, width),
    ):
        layer |= {f"{linear}.weight": (ins, outs), f"{linear}.bias": (outs,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_in.weight": (config.vocab_size, width)}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"final_layer_norm.weight": (width,), "final_layer_norm.bias": (width,)}
    if not config.tie_word_embeddings:
        shapes["embed_out.weight"] = (width, config.vocab_size)
    return shapes


def rotary_tables(config: PythiaConfig) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (max_seq_len, rotary_dims / 2) in float32. The angles are rounded to float32 as
    every GPT-NeoX rounds them: the published weights have learned those."""
    turned = config.rotary_dims
    exponents = np.arange(0, turned, 2, dtype=np.float32) / np.float32(max(turned, 1))
    frequencies = np.float32(1) / np.float32(config.rotary_base) ** exponents
    angles = np.outer(np.arange(config.max_seq_len, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


# ---- the model --------------------------------------------------------------------------------


class Pythia(hooks.Hooked, nn.Module):
    """A GPT-NeoX language model.

    `dtype` (default: the configuration's) is that of parameters and activations. `initialise=False`
    leaves matrices zero and draws no random number: for weights that are loaded next. `tokenizer`
    is where the model came from with one: what save_pretrained() writes unless told otherwise.

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    >>> model = ndl.Pythia(config)
    >>> logits, loss = model([[1, 2, 3]], targets=[[2, 3, 4]])
    >>> logits.shape, loss.shape
    ((1, 3, 50), ())
    """

    def __init__(
        self,
        config: PythiaConfig,
        device: Device | None = None,
        dtype: str | None = None,
        initialise: bool = True,
    ) -> None:
        super().__init__()
        if dtype is not None:
            config = dataclasses.replace(config, dtype=dtype)
        self.config = config
        self.device = default_device() if device is None else device
        make = _Factory(self.device, config.dtype, initialise)
        small, _ = initial_stds(config)
        self.embed_in = Embedding(config.vocab_size, config.hidden_size, small, make)
        self.layers = [Layer(config, make) for _ in range(config.num_layers)]
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, make)
        self.embed_out = (
            TiedHead(self.embed_in)
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, small, make, bias=False)
        )
        self._rotary = tuple(array(t, "float32", self.device) for t in rotary_tables(config))
        self._mask: tuple[int, BlockMask] | None = None  # the last length and its mask
        self.tokenizer: Any = None
        self.named_parameters()  # gives each its name, under which optimizers keep their state

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, device: Device | None = None, dtype: str | None = None
    ) -> Pythia:
        """The GPT-NeoX model that `transformers` saved in `folder`, in `dtype` (float32 where none
        is given, whatever the files hold). CheckpointError lists all that does not fit.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> model.save_pretrained(folder)
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'generation_config.json', 'model.safetensors']
        >>> ndl.Pythia.from_pretrained(folder, dtype="bfloat16").config.dtype
        'bfloat16'
        """
        from needle import hf  # it builds on this file

        return hf.load(folder, device, dtype or "float32")

    def save_pretrained(self, folder: str | os.PathLike, tokenizer: Any = None) -> None:
        """Writes a folder that `transformers` opens: configuration, weights, and the tokenizer: a
        tokenizer.json, the folder of one, a `tokenizers.Tokenizer` or a tokenizer of transformers;
        where none is given, `self.tokenizer`."""
        from needle import hf  # it builds on this file

        hf.save(self, folder, tokenizer)

    def forward(self, input_ids: Any, targets: Any = None) -> tuple[Tensor, Tensor | None]:
        """ids (B, T) -> logits (B, T, V) and, with targets (B, T), the mean cross-entropy in nats
        over the targets that are not negative.

        Host data (lists, NumPy, CPU arrays) is checked against the vocabulary before anything is
        uploaded: ValueError. An int32 NDArray that lies on the GPU already is taken as it is.
        """
        ids = self._tokens(input_ids, "input_ids", low=0)
        wanted = None if targets is None else self._tokens(targets, "targets", low=None)
        if wanted is not None and tuple(wanted.shape) != tuple(ids.shape):
            raise ValueError(
                f"Pythia: targets have shape {tuple(wanted.shape)}, input_ids "
                f"{tuple(ids.shape)}; both must be (batch, time)"
            )
        batch, time = ids.shape
        logits = self.embed_out(self._hidden(ids))
        if wanted is None:
            return logits, None
        flat = logits.reshape((batch * time, self.config.vocab_size))
        return logits, ops.cross_entropy(flat, wanted.reshape((batch * time,)))

    def final_hidden(self, input_ids: Any) -> Tensor:
        """ids (B, T) -> what the head reads, (B, T, C) behind the final norm; ids are checked as
        in forward()."""
        return self._hidden(self._tokens(input_ids, "input_ids", low=0))

    def _hidden(self, ids: NDArray) -> Tensor:
        """What the head reads: (B, T, C) behind the final norm."""
        time = ids.shape[1]
        rotary = tuple(table[:time] for table in self._rotary)
        mask = self._block_mask(time)
        x = self.embed_in(ids)
        if self._hooks is not None:
            return hooks.hidden(self, x, rotary, mask, self._hooks)
        packed = (*x.shape[:2], self.config.num_heads, 3, self.config.head_dim)

        def attend(qkv: Tensor) -> Tensor:
            seen = ops.qkv_attention(qkv.reshape(packed), *rotary, causal=True, mask=mask)
            return seen.reshape(x.shape)

        for layer in self.layers:
            x = layer(x, attend)
        return self.final_layer_norm(x)

    def _block_mask(self, time: int) -> BlockMask | None:
        config = self.config
        if not config.use_sparse_attention:
            return None
        if self._mask is None or self._mask[0] != time:
            self._mask = (time, sparse_mask(config, time))
        return self._mask[1]

    def _tokens(self, ids, what: str, low: int | None) -> NDArray:
        """int32 (B, T) on the model's device; host values below `low` or beyond the vocabulary
        are refused."""
        if isinstance(ids, Tensor):
            ids = ids.cached_data
        on_device = (
            isinstance(ids, NDArray)
            and ids.device == self.device
            and ids.dtype == "int32"
            and not ids.device.is_host
        )
        if not on_device:
            ids = ids.numpy() if isinstance(ids, NDArray) else np.asarray(ids)
            whole = ids.dtype.kind in "iu" or (
                ids.dtype.kind == "f" and np.isfinite(ids).all() and (ids == np.floor(ids)).all()
            )
            if not whole:
                raise TypeError(f"Pythia: {what} must be whole numbers, but are {ids.dtype}")
        if len(ids.shape) != 2:
            raise ValueError(
                f"Pythia: {what} must be (batch, time), but the shape is {tuple(ids.shape)}"
            )
        if 0 in ids.shape:
            raise ValueError(f"Pythia: {what} are empty: the shape is {tuple(ids.shape)}")
        if ids.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"Pythia: {what} are {ids.shape[1]} tokens long, but max_seq_len is "
                f"{self.config.max_seq_len}"
            )
        if on_device:
            return ids
        check_tokens(ids, self.config.vocab_size, what, low)
        # All negative targets mean the same: let none wrap around in 32 bits.
        return array(ids.astype(np.int64).clip(-1).astype(np.int32), "int32", self.device)

    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters())

    def flops_per_token(self, time: int) -> float:
        """Floating-point operations a token of forward and backward at length `time`: 6 for each
        element of a matrix that multiplies it (the embedding multiplies nothing), and attention
        over the keys that are seen: half of all, of a block mask half of each diagonal block."""
        config = self.config
        width, inner = config.hidden_size, config.intermediate_size
        matrices = (
            config.num_layers * (4 * width * width + 2 * width * inner) + width * config.vocab_size
        )
        mask = self._block_mask(time)
        seen = 0.5
        if mask is not None:
            blocks = mask.causal().blocks
            seen = (blocks.sum() - np.trace(blocks, axis1=1, axis2=2).sum() / 2) / blocks.size
        return 6 * matrices + 12 * config.num_layers * width * time * seen

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Pythia({self.num_parameters():,} parameters, {config.num_layers} layers, hidden "
            f"{config.hidden_size}, {config.num_heads} heads, vocabulary {config.vocab_size}, "
            f"{config.dtype} on {self.device})"
        )

    # ---- generation ---------------------------------------------------------------------------

    def stream(
        self,
        input_ids: Any,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int] = (),
        repetition_penalty: float = 1.0,
        attention_mask: Any = None,
    ) -> Iterator[np.ndarray]:
        """Yields the next token of each row, int32 (B,): see needle.generation.stream.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> for tokens in model.stream([1, 2, 3], 2, temperature=0.0):
        ...     print(tokens.shape, tokens.dtype)
        (1,) int32
        (1,) int32
        """
        return generation.stream(
            self,
            input_ids,
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            seed,
            stop,
            repetition_penalty,
            attention_mask,
        )

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int] = (),
        repetition_penalty: float = 1.0,
        attention_mask: Any = None,
    ) -> np.ndarray | list[np.ndarray]:
        """The prompt and what follows it, int64: see needle.generation.generate.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> model.generate([[1, 2, 3], [4, 5, 6]], 10, temperature=0.0).shape
        (2, 13)
        >>> [len(row) for row in model.generate([[1, 2, 3], [4]], 10, top_p=0.9, seed=0)]
        [13, 11]
        """
        return generation.generate(
            self,
            input_ids,
            max_new_tokens,
            temperature,
            top_k,
            top_p,
            seed,
            stop,
            repetition_penalty,
            attention_mask,
        )


def sparse_mask(config: PythiaConfig, time: int) -> BlockMask:
    """The block mask that the configuration describes, for sequences of `time` tokens."""
    window, block = config.sparse_window, config.sparse_block
    if config.sparse_pattern == "local":
        return BlockMask.local(time, window, block)
    if config.sparse_pattern == "strided":
        return BlockMask.strided(time, window, block)
    if config.sparse_pattern == "global":
        return BlockMask.global_(time, block, block)
    if config.sparse_pattern == "dense":
        return BlockMask.dense(time, block)
    return BlockMask.mixed(time, window=window, n_global=block, block=block)


def check_tokens(ids: np.ndarray, vocab_size: int, what: str, low: int | None) -> None:
    """ValueError naming the first id that is `vocab_size` or more, or below `low`."""
    wrong = ids >= vocab_size
    if low is not None:
        wrong |= ids < low
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"Pythia: {what}: token {int(ids[where])} at position {where} is outside "
            f"the vocabulary of {vocab_size}"
        )


def create_pythia_70m(
    vocab_size: int = 50304,
    max_seq_len: int = 2048,
    use_sparse_attention: bool = False,
    device: Device | None = None,
    dtype: str = "float32",
) -> tuple[Pythia, PythiaConfig]:
    """A freshly initialised Pythia-70M and its configuration."""
    config = PythiaConfig.preset(
        "pythia-70m",
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        use_sparse_attention=use_sparse_attention,
        dtype=dtype,
    )
    return Pythia(config, device=device), config
