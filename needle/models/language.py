"""The base of language models: ids in, logits and loss out, generation, hooks, sizes.

A subclass has a configuration with vocab_size, max_seq_len and dtype, makes its modules in
__init__, and writes

    hidden(ids, cache)   int32 ids (B, T) on the device -> (B, T, C), as the head reads it; layer i
                         gives `cache.layer(i)`, where there is a cache, to its nn.Attention. Then T
                         may be 1 at a later position: positions_of(ids, cache) has the positions
    embed_out            (B, T, C) -> logits (B, T, V): nn.Linear or nn.TiedHead

Everything else is read off its modules. Axis letters: B batch, T time, C channels, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, overload

import numpy as np

from needle import generation, nn, ops
from needle.autograd import Tensor, is_grad_enabled
from needle.backend_ndarray import Device, NDArray, array, given_device
from needle.block_mask import BlockMask
from needle.interp.hooks import Hooked, hook_names
from needle.interp.text import Texts
from needle.models.registry import Config
from needle.ops.fp8 import MULTIPLE, whole_sizes


class LanguageModel(Texts, Hooked):
    """`dtype` (default: the configuration's) is that of parameters and activations. `tokenizer`:
    set if the model was loaded with one."""

    config_class: ClassVar[type[Config]]
    embed_out: nn.Module
    # True to compute layers again in the backward, which saves memory (nn.recompute); None for a
    # class whose `hidden` does not support it.
    recompute: bool | None = None
    # True to compute loss() in FP8; use_fp8() sets it where that is possible.
    fp8: bool = False
    # The layers that then are in FP8: "layers", "3 of 24 layers", or "" for none. Where there are
    # some, loss() calls `hidden` with fp8=True.
    layers_in_fp8: str = ""
    # The ranks that share each sequence; `shares` is True for a class whose `hidden` supports it.
    group: Any = None
    shares: bool = False
    _positions: NDArray | None = None

    def __init__(self, config: Any, device: Device | None = None, dtype: str | None = None) -> None:
        super().__init__()
        self.config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
        self.device = given_device(device)

    def was_moved(self, dtype: str | None) -> None:
        """Give the configuration the new dtype, and the weights the places of a new model's, which
        generation would move below a graph that waits for its backward."""
        if dtype is not None:
            self.config = dataclasses.replace(self.config, dtype=dtype)
        nn.place_neighbours(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy, or what was pickled."""
        vars(self).update(state)
        self.was_moved(None)

    def hidden(self, ids: NDArray, cache: generation.Cache | None = None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.hidden is not defined")

    def hidden_from(self, x: Tensor, layer: int) -> Tensor:
        """Return hidden() of the residual stream (B, T, C) that enters `layer`. Patching needs
        it."""
        raise NotImplementedError(
            f"{self._name}: its hidden() needs a hidden_from(x, layer) beside it, which goes on "
            "from the stream that enters a layer"
        )

    def positions_of(self, ids: NDArray, cache: generation.Cache | None = None) -> NDArray:
        """Return the positions of the tokens that hidden(ids, cache) computes, for an embedding of
        positions: int32, (1, T), or (B, 1) in a step over a cache, where each row has its own."""
        if cache is not None and cache.filled:
            return cache.positions.reshape(ids.shape)
        if self._positions is None:  # kept: a recorded step uploads nothing
            order = np.arange(self.config.max_seq_len)[None]
            self._positions = array(order, "int32", self.device)
        return self._positions[:, : ids.shape[1]]

    def block_mask(self, time: int) -> BlockMask | None:
        """The blocks of keys that attention reads in sequences of `time` tokens; None: all. Models
        that have one generate without a cache. A query must see the same keys in sequences of any
        length: those of a batch to score are padded to the longest."""
        return None

    def share_sequences(self, group: Any) -> None:
        """Share each sequence of T tokens among the ranks of `group` (a Group or Subgroup of
        needle.distributed): ids and targets are this rank's `ops.ring_chunks(T, rank, ranks)`, and
        the loss is the mean over them. None ends it. Generation does not share. TypeError for a
        class that does not support it."""
        if not self.shares:
            raise TypeError(f"{self._name}: its sequences cannot be shared among ranks")
        self.group = group
        for _, module in self.named_modules():
            if isinstance(module, nn.Attention):
                module.group = group

    def use_fp8(self) -> None:
        """Compute products of loss() in FP8, unless gradients are disabled, for batches of a
        multiple of 16 tokens; others are computed as before. `parts_in_fp8` names them: those of
        the head (ops.linear_cross_entropy), of layers (ops.layer) or both.
        `model.fp8 = False` ends it. ValueError where the model or its GPU cannot."""
        if not self._has_plain_head:
            raise ValueError(
                f"fp8: a {self._name} must have the forward() of LanguageModel, and a head without "
                "a bias: nn.Linear or nn.TiedHead"
            )
        width, vocabulary = self._head_sizes
        for what, size in ("width", width), ("vocabulary", vocabulary):
            if not whole_sizes(size):
                raise ValueError(
                    f"fp8: {what} {size} must be a multiple of {MULTIPLE}, such as "
                    f"{-(-size // MULTIPLE) * MULTIPLE}"
                )
        if not self.parts_in_fp8:
            widest = ops.LinearCrossEntropyFP8.WIDEST
            raise ValueError(f"fp8: width {width} is more than {widest}, and no layer takes FP8")
        arch = 90 if self.device.is_host else self.device.limits()["arch"]
        if arch != 90:
            raise ValueError(
                f"fp8: {self.device} has compute capability {arch // 10}.{arch % 10}, but products "
                "in FP8 are written for 9.0 (Hopper): train without it, a run in FP8 by --init"
            )
        self.fp8 = True

    @property
    def parts_in_fp8(self) -> str:
        """What use_fp8() takes: "head", "head and layers", "1 of 2 layers" ..., "" for nothing."""
        head = self._has_plain_head and ops.LinearCrossEntropyFP8.serves(*self._head_sizes)
        return " and ".join(filter(None, ["head" * head, self.layers_in_fp8]))

    @property
    def _head_sizes(self) -> tuple[int, int]:
        """(C, V) of a plain head."""
        sizes = self.embed_out.weight.shape
        return sizes[::-1] if isinstance(self.embed_out, nn.TiedHead) else sizes

    @property
    def _has_plain_head(self) -> bool:
        """True if loss() may compute head and loss in one op."""
        head, own = self.embed_out, type(self).forward is not LanguageModel.forward
        plain = nn.fuses_as(head, nn.Linear, nn.TiedHead) and getattr(head, "bias", None) is None
        return plain and not own

    @property
    def cfg(self) -> Any:
        """The configuration, by TransformerLens' name."""
        return self.config

    @overload
    def forward(self, input_ids: Any, targets: Any = None) -> tuple[Tensor, Tensor | None]: ...
    @overload
    def forward(self, input_ids: Any, targets: Any = None, *, return_type: str | None) -> Any: ...
    def forward(self, input_ids: Any, targets: Any = None, return_type: str | None = "pair") -> Any:
        """ids (B, T), or text, -> logits (B, T, V) and, with targets (B, T), the mean cross-entropy
        in nats over the targets that are not negative. return_type, as in TransformerLens:
        "logits", "loss", "both" or None for nothing; the targets of a loss are then by default the
        next tokens.

        Host data (lists, NumPy, CPU arrays) is checked against the vocabulary before anything is
        uploaded: ValueError. An int32 NDArray that lies on the GPU already is taken as it is.
        """
        if return_type not in ("pair", "logits", "loss", "both", None):
            raise ValueError(
                f'return_type must be "logits", "loss", "both" or None, not {return_type!r}'
            )
        if return_type is None:
            self.final_hidden(input_ids)
            return None
        if return_type in ("loss", "both") and targets is None:
            targets = self._next_tokens(input_ids)
        if return_type == "loss":
            return self.loss(input_ids, targets)
        if return_type == "logits":
            return self.embed_out(self.final_hidden(input_ids))
        if targets is None:
            return self.embed_out(self.final_hidden(input_ids)), None
        ids, wanted = self._ids_and_targets(input_ids, targets)
        logits = self.embed_out(self.hidden(ids))
        flat = logits.reshape((ids.size, self.config.vocab_size))
        return logits, ops.cross_entropy(flat, wanted)

    def loss(self, input_ids: Any, targets: Any) -> Tensor:
        """The loss of forward(), for training: logits are stored once instead of twice and not
        returned. A head other than nn.TiedHead and nn.Linear without a bias is called as it is,
        and so is the forward() of a class that writes its own.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> loss = model.loss([[1, 2, 3]], targets=[[2, 3, 4]])
        >>> abs(loss.item() - model([[1, 2, 3]], targets=[[2, 3, 4]])[1].item()) < 1e-6
        True
        """
        if not self._has_plain_head:
            return self(input_ids, targets)[1]
        head = self.embed_out
        ids, wanted = self._ids_and_targets(input_ids, targets)
        transposed = isinstance(head, nn.TiedHead)
        layers = self.fp8 and is_grad_enabled() and self.layers_in_fp8
        hidden = self.hidden(ids, fp8=True) if layers else self.hidden(ids)
        return ops.linear_cross_entropy(hidden, head.weight, wanted, transposed, self.fp8)

    def _ids_and_targets(self, input_ids: Any, targets: Any) -> tuple[NDArray, NDArray]:
        """(B, T) and (B T,) on the device, checked."""
        ids = self._tokens(input_ids, "input_ids", low=0)
        wanted = self._tokens(targets, "targets", low=None)
        if tuple(wanted.shape) != tuple(ids.shape):
            raise ValueError(
                f"{self._name}: targets have shape {tuple(wanted.shape)}, input_ids "
                f"{tuple(ids.shape)}; both must be (batch, time)"
            )
        return ids, wanted.reshape((ids.size,))

    def _next_tokens(self, input_ids: Any) -> np.ndarray:
        """(B, T): the target of each token, -1 at the end of each row or text."""
        targets = np.roll(self._tokens(input_ids, "input_ids", low=0).numpy(), -1, axis=1)
        targets[:, -1] = -1
        if isinstance(input_ids, (list, tuple)) and isinstance(input_ids[0], str):
            for row, text in zip(targets, input_ids):
                row[max(self.to_tokens(text).size - 1, 0) :] = -1
        return targets

    def final_hidden(self, input_ids: Any) -> Tensor:
        """ids (B, T) -> (B, T, C), as the head reads it; ids are checked as in forward()."""
        return self.hidden(self._tokens(input_ids, "input_ids", low=0))

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _tokens(self, ids: Any, what: str, low: int | None) -> NDArray:
        """int32 (B, T) on the model's device; host values below `low` or beyond the vocabulary
        are refused."""
        if isinstance(ids, str) or (
            isinstance(ids, (list, tuple)) and all(isinstance(one, str) for one in ids) and ids
        ):
            ids = self.to_tokens(ids)
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
        shape = tuple(ids.shape)
        what = f"{self._name}: {what}"
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"{what} must be (batch, time), one token at least, but the shape is {shape}"
            )
        if shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"{what} are {shape[1]} tokens long, but max_seq_len is {self.config.max_seq_len}"
            )
        if on_device:
            return ids
        ids = generation.checked_ids(ids, self.config.vocab_size, what, low)
        # All negative targets mean the same: let none wrap around in 32 bits.
        return array(ids.clip(-1).astype(np.int32), "int32", self.device)

    def __repr__(self) -> str:
        attentions = self._modules(nn.Attention)
        heads = attentions[0].heads if attentions else 0
        return (
            f"{self._name}({self.num_parameters():,} parameters, {len(attentions)} layers, hidden "
            f"{heads * attentions[0].head_dim if attentions else 0}, {heads} heads, vocabulary "
            f"{self.config.vocab_size}, {self.config.dtype} on {self.device})"
        )

    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters())

    def _modules(self, *kinds: type) -> list[Any]:
        return [module for _, module in self.named_modules() if isinstance(module, kinds)]

    def flops_per_token(self, time: int) -> float:
        """Floating-point operations a token of forward and backward at length `time`: 6 for each
        element of a matrix that multiplies it (the embedding multiplies nothing), and attention
        over the keys that are seen: half of all, of a block mask half of each diagonal block."""
        matrices = sum(linear.weight.size for linear in self._modules(nn.Linear, nn.TiedHead))
        width = sum(
            attention.heads * attention.head_dim for attention in self._modules(nn.Attention)
        )
        mask = self.block_mask(time)
        seen = 0.5
        if mask is not None:
            blocks = mask.causal().blocks
            seen = (blocks.sum() - np.trace(blocks, axis1=1, axis2=2).sum() / 2) / blocks.size
        return 6 * matrices + 12 * width * time * seen

    def hidden_states(self, input_ids: Any) -> tuple[Tensor, ...]:
        """The residual stream of ids (B, T), as `output_hidden_states` of transformers: L + 1
        Tensors (B, T, C): the input of each layer, and the input of the head after the final norm.

        >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
        >>> model = ndl.Pythia(config)
        >>> [state.shape for state in model.hidden_states([[1, 2, 3]])]
        [(1, 3, 16), (1, 3, 16)]
        """
        names = [name for name in hook_names(self) if name.endswith(".hook_resid_pre")]
        names.append("ln_final.hook_out")
        _, cache = self.run_with_cache(input_ids, names)
        return tuple(cache[name] for name in names)

    stream = generation.stream
    generate = generation.generate
