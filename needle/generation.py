"""Generation: a prompt of each row in one pass, then one token a step from a cache of keys and
values.

    prefill    all prompts at once, padded on the right, where causality hides the padding; the
               rotated keys and the values of each layer go into a cache (B, H, S, D)
    step       one new token a row at its own position: decode_attention over what is cached

Both are the model's own forward: its attention hands q, k and v to the cache, which attends. On
CUDA the step is recorded once as a graph and replayed (`_C.Graph`): tokens and positions live on
the device, and the step advances them itself. Without top_k, top_p and a penalty the token is
chosen there too, so that the host reads tokens a step late and the device never waits. Otherwise
the logits come to the host, and `sampling` draws.

Without a cache the context is computed again for each token. That is so for block-sparse models
(a pattern belongs to whole blocks of queries), for models with hooks in force (a hook gets whole
forwards), and for contexts beyond max_seq_len (their last part is read).

A model is what models/language.py describes: `config` with vocab_size, max_seq_len and dtype,
`device`, `hidden(ids, cache)`, `embed_out`, `block_mask(T)`, `is_hooked`, and nn.Attention inside.
Axis letters: B rows, T time, S capacity of the cache, C channels, H heads, D head dim, V
vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from needle import _C, nn
from needle._C import NDArray
from needle.autograd import Tensor, no_grad
from needle.backend_ndarray import array, empty, full, zeros
from needle.data.tokenizer import Tokenizer, load_tokenizer
from needle.ops.attention import qkv_parts
from needle.ops.random import new_state
from needle.sampling import BROKEN, check_sampling, penalized, sample

# A cache holds a multiple of so many positions.
CAPACITY_STEP = 64
# With fewer steps to come, recording one costs more than it saves.
STEPS_WORTH_RECORDING = 2


# ---- ids ----------------------------------------------------------------------------------------


def stream(
    model: Any,
    input_ids: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Collection[int] | None = None,
    repetition_penalty: float = 1.0,
) -> Iterator[np.ndarray]:
    """Yields the next token of each row, int32 (B,), until max_new_tokens or until every row has
    produced a token of `stop` (by default the ends of a text after a prompt that is text, none
    after ids); a row that has stopped repeats its stop token.

    input_ids: (B, T) or (T,), or a sequence of prompts of different lengths; text, or a list of
    texts, where the model has a tokenizer. Each row gets what it would get alone: it has its own
    positions.
    temperature 0 takes the likeliest token. top_k keeps the k likeliest, then top_p the fewest that
    have probability p together. repetition_penalty divides positive logits of tokens that the row
    holds already, prompt included, and multiplies negative ones.
    Random numbers are NumPy's global stream, or an own one where a seed is given: one a row and
    step with top_k, top_p or a penalty, else one for all, the key of Philox on the device. Of a
    context beyond max_seq_len the last part is read. Raises ValueError for ids outside the
    vocabulary, empty prompts, no prompts, and settings that are not allowed.

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    >>> model = ndl.Pythia(config)
    >>> for tokens in model.stream([1, 2, 3], 2, temperature=0.0):
    ...     print(tokens.shape, tokens.dtype)
    (1,) int32
    (1,) int32
    """
    if not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens < 0:
        raise ValueError(
            f"generate: max_new_tokens must be a whole number of 0 or more, not {max_new_tokens!r}"
        )
    rows, stop, _ = _prompts(model, input_ids, stop)
    stops = np.array(list(stop) if np.iterable(stop) else [None])
    if stops.size and stops.dtype.kind not in "iu":
        raise TypeError(f"generate: stop must be a list of token ids, not {stop!r}")
    check_sampling(temperature, top_k, top_p, repetition_penalty, seed)
    settings = temperature, top_k, top_p
    chooser = _Chooser(model, settings, seed, repetition_penalty, rows)
    contexts = [row.tolist() for row in rows]
    stopped = np.zeros(len(rows), bool)
    with contextlib.closing(_tokens(model, contexts, max_new_tokens, chooser)) as tokens:
        for drawn in tokens:
            last = np.array([context[-1] for context in contexts])
            drawn = np.where(stopped, last, drawn).astype(np.int32)
            for context, token in zip(contexts, drawn):
                context.append(int(token))
            yield drawn
            stopped |= np.isin(drawn, stops)
            if stopped.all():
                return


def generate(
    model: Any,
    input_ids: Any,
    max_new_tokens: int = 20,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Collection[int] | None = None,
    repetition_penalty: float = 1.0,
) -> Any:
    """The prompt and what follows it, int64, or as text where it is text; arguments as of stream().

    (B, T) gives (B, T + n), where rows that stopped early repeat their stop token, and (T,) gives
    (T + n,). Prompts of different lengths give a list of one array a row, each ending with its stop
    token where it met one.

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    >>> model = ndl.Pythia(config)
    >>> model.generate([[1, 2, 3], [4, 5, 6]], 10, temperature=0.0).shape
    (2, 13)
    >>> [len(row) for row in model.generate([[1, 2, 3], [4]], 10, top_p=0.9, seed=0)]
    [13, 11]
    """
    rows, stop, is_text = _prompts(model, input_ids, stop)
    settings = temperature, top_k, top_p, seed, stop, repetition_penalty
    new = list(stream(model, rows, max_new_tokens, *settings))
    new = np.array(new, np.int64).reshape(len(new), len(rows)).T
    if not is_text and len({len(row) for row in rows}) == 1:
        out = np.concatenate([np.stack(rows), new], axis=1)
        one = np.ndim(input_ids) == 1 if hasattr(input_ids, "ndim") else np.ndim(input_ids[0]) == 0
        return out[0] if one else out
    found = [np.concatenate([row, _up_to_stop(tokens, stop)]) for row, tokens in zip(rows, new)]
    if is_text:
        found = [model.to_string(row) for row in found]
    return found[0] if isinstance(input_ids, str) else found


def _prompts(
    model: Any, prompts: Any, stop: Collection[int] | None
) -> tuple[list[np.ndarray], Collection[int], bool]:
    """Return the rows of ids, checked; the tokens that stop; and whether the prompts are text."""
    texts = [prompts] if isinstance(prompts, str) else prompts
    is_text = isinstance(texts, (list, tuple)) and bool(texts) and isinstance(texts[0], str)
    if is_text:
        prompts = [model.to_tokens(text)[0] for text in texts]
    rows = prompt_rows(prompts, model.config.vocab_size)
    ends = model.tokenizer.stops if is_text else ()
    return rows, ends if stop is None else stop, is_text


def _up_to_stop(tokens: np.ndarray, stop: Collection[int]) -> np.ndarray:
    found = np.flatnonzero(np.isin(tokens, list(stop)))
    return tokens[: found[0] + 1] if len(found) else tokens


def prompt_rows(input_ids: Any, vocab_size: int) -> list[np.ndarray]:
    """The prompts as int64 arrays (T,), checked. See stream() for what they may be."""
    if hasattr(input_ids, "numpy"):
        input_ids = input_ids.numpy()
    if not hasattr(input_ids, "__len__") or isinstance(input_ids, (Mapping, Set)):
        raise TypeError(
            f"generate: input_ids must be token ids, (B, T), (T,) or a list of prompts, "
            f"not {type(input_ids).__name__}"
        )
    if isinstance(input_ids, np.ndarray) or (len(input_ids) and np.ndim(input_ids[0]) == 0):
        input_ids = np.atleast_2d(np.asarray(input_ids))
    if len(input_ids) == 0:
        raise ValueError("generate: there is no prompt; give at least one row")
    rows = []
    for number, row in enumerate(map(np.asarray, input_ids)):
        what = f"generate: input_ids, row {number}"
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"{what}: must be token ids, one at least; its shape is {row.shape}")
        rows.append(checked_ids(row, vocab_size, what, low=0))
    return rows


def checked_ids(ids: np.ndarray, vocab_size: int, what: str, low: int | None) -> np.ndarray:
    """Return ids as int64. TypeError unless they are whole numbers, ValueError for one below `low`
    or outside the vocabulary."""
    whole = ids.dtype.kind in "iu" or (
        ids.dtype.kind == "f" and np.isfinite(ids).all() and (ids == np.floor(ids)).all()
    )
    if not whole:
        raise TypeError(f"{what} must be whole numbers, but are {ids.dtype}")
    wrong = ids >= vocab_size
    if low is not None:
        wrong |= ids < low
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"{what}: token {int(ids[where])} at position {where} is outside the vocabulary of "
            f"{vocab_size}"
        )
    return ids.astype(np.int64)


# ---- text ---------------------------------------------------------------------------------------


def stream_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    *,
    stop_strings: Sequence[str] = (),
    end: int | None = None,
    **options: Any,
) -> Iterator[str]:
    """Yield the text that follows a prompt as it is drawn, in whole characters.

    Ends before the first of `stop_strings`, before the token `end` (by default each end of a text
    that the tokenizer knows), or after max_new_tokens. The beginning of a stop string that comes in
    several tokens has been yielded by then. tokenizer: as ndl.data.load_tokenizer takes it; an
    empty prompt begins after the end of a text. options: of stream().
    """
    (text,), tokens = _begun(model, tokenizer, [prompt], max_new_tokens, stop_strings, end, options)
    for drawn in tokens:
        yield text.push(int(drawn[0]))
        if text.done:
            break
    yield text.rest()


def generate_text(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    *,
    stop_strings: Sequence[str] = (),
    end: int | None = None,
    **options: Any,
) -> list[str]:
    """The text that follows each prompt, a text or its ids, as stream_text() tells it; all prompts
    in one batch.

    >>> tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat "] * 9), 280)
    >>> config = ndl.PythiaConfig(vocab_size=280, hidden_size=16, num_layers=1, num_heads=2)
    >>> prompts = ["the cat", "on"]
    >>> texts = ndl.generation.generate_text(
    ...     ndl.Pythia(config), tokenizer, prompts, 20, stop_strings=["mat"], temperature=0.0)
    >>> len(texts), any("mat" in text for text in texts)
    (2, False)
    """
    if isinstance(prompts, str):
        raise TypeError("generate_text: prompts must be a list of strings, not one string")
    texts, tokens = _begun(model, tokenizer, prompts, max_new_tokens, stop_strings, end, options)
    for drawn in tokens:
        for text, token in zip(texts, drawn):
            text.push(int(token))
        if all(text.done for text in texts):
            break
    return [text.text for text in texts]


def _begun(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    count: int,
    stop_strings: Sequence[str],
    end: int | None,
    options: dict[str, Any],
) -> tuple[list[_Text], Iterator[np.ndarray]]:
    """Return the texts of the prompts, empty so far, and their tokens to come."""
    tokenizer = load_tokenizer(tokenizer)
    ends, ids = tokenizer.stops if end is None else (end,), []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt.encode()  # a ValueError for bytes of a shell that are no UTF-8
            prompt = tokenizer.encode(prompt, add_special_tokens=False).ids or [*ends[:1]]
        ids.append(prompt)
    texts = [_Text(tokenizer, stop_strings, ends, row) for row in ids]
    return texts, stream(model, ids, count, stop=ends, **options)


class _Text:
    """The text of one row as its tokens come. They are decoded behind the prompt's last character:
    the decoder of many tokenizers drops a space at the beginning."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        ends: tuple[int, ...],
        prompt: Sequence[int],
    ) -> None:
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ValueError(
                f"stop_strings must be a list of strings that are not empty, not {stop_strings!r}"
            )
        self.tokenizer, self.stops, self.ends = tokenizer, tuple(stop_strings), ends
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text, self.shown, self.done = "", 0, False

    @functools.cached_property
    def before(self) -> tuple[list[int], int]:
        """The last tokens of the prompt that are a text, and its length: a character has four of
        them at most."""
        last = ([int(i) for i in self.prompt[-n:]] for n in range(1, 5))
        texts = ((ids, self.tokenizer.decode(ids)) for ids in last)
        found = ((ids, len(text)) for ids, text in texts if text[-1:] not in ("", "\ufffd"))
        return next(found, ([], 0))

    def push(self, token: int) -> str:
        """The text that this token adds, in whole characters."""
        if self.done or token in self.ends:
            self.done = True
            return ""
        self.tokens.append(token)
        before, start = self.before
        self.text = self.tokenizer.decode(before + self.tokens)[start:]
        found = [at for at in map(self.text.find, self.stops) if at >= 0]
        if found:
            self.text, self.done = self.text[: min(found)], True
        elif self.text.endswith("\ufffd"):  # a character is not complete yet
            return ""
        return self.rest()

    def rest(self) -> str:
        """The text that has not been told yet."""
        new = self.text[self.shown :]
        self.shown = max(self.shown, len(self.text))
        return new


# ---- choosing -----------------------------------------------------------------------------------


class _Chooser:
    """The settings of sampling: temperature, top_k and top_p; and the tokens that each row has
    seen."""

    def __init__(
        self, model: Any, settings: tuple, seed: int | None, penalty: float, rows: list[np.ndarray]
    ) -> None:
        self.settings, self.penalty = settings, penalty
        self.random = np.random if seed is None else np.random.RandomState(seed)
        self.on_device = penalty == 1 and (settings[0] == 0 or settings[1:] == (None, None))
        self.state: NDArray | None = None  # of what the device draws from
        if self.on_device and settings[0] > 0:
            self.state = new_state(model.device, self.random)
        if penalty != 1:
            self.seen = np.zeros((len(rows), model.config.vocab_size), bool)
            for seen, row in zip(self.seen, rows):
                seen[row] = True

    def choose(self, logits: np.ndarray) -> np.ndarray:
        """float32 logits (B, V) -> ids (B,)."""
        if self.state is not None:
            tokens = zeros((len(logits),), "int32", self.state.device)
            given = array(logits, "float32", self.state.device)
            self.choose_there(given, tokens, zeros(tokens.shape, "int32", tokens.device))
            return checked(tokens.numpy())
        if self.penalty != 1:
            logits = penalized(logits, self.seen, self.penalty)
        drawn = sample(logits, *self.settings, self.random)
        if self.penalty != 1:
            self.seen[np.arange(len(drawn)), drawn] = True
        return drawn

    def choose_there(self, logits: NDArray, tokens: NDArray, positions: NDArray) -> None:
        """tokens = those of logits (B, V), -1 where they are broken; positions += 1. On the device
        alone, so that it can be recorded."""
        if self.state is None:
            _C.decode_greedy(logits, tokens, positions)
        else:
            _C.random_tokens(self.state, logits, self.settings[0], tokens, positions)


def checked(drawn: np.ndarray) -> np.ndarray:
    """Return the tokens. ValueError if the logits of a row were broken."""
    if (drawn < 0).any():
        raise ValueError(BROKEN)
    return drawn


def _tokens(
    model, contexts: list[list[int]], count: int, chooser: _Chooser
) -> Iterator[np.ndarray]:
    """Yields the next `count` tokens of each row. The caller appends them to `contexts`."""
    longest = max(map(len, contexts))
    cached = 0
    if model.block_mask(longest) is None and not model.is_hooked:
        # The last token of all is never fed, so it needs no position.
        cached = min(count, max(0, model.config.max_seq_len - longest + 1))
    if cached:
        made = _Decoder(model, contexts, longest + cached - 1, chooser)
        with contextlib.closing(made) as decoder:
            for drawn in decoder.tokens(cached):
                count -= 1
                yield drawn
    for _ in range(count):
        yield chooser.choose(_recomputed(model, contexts))


# ---- without a cache ----------------------------------------------------------------------------


def _recomputed(model, contexts: list[list[int]]) -> np.ndarray:
    """float32 logits (B, V) after each context, of which the last max_seq_len tokens are read."""
    rows = [context[-model.config.max_seq_len :] for context in contexts]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        return np.concatenate([_recomputed(model, [row]) for row in rows])
    with no_grad():
        hidden = model.final_hidden(np.array(rows)).cached_data
        last = Tensor.from_ndarray(hidden[:, hidden.shape[1] - 1, :].compact())
        return model.embed_out(last).cached_data.numpy()[:, 0, :].astype(np.float32)


# ---- with a cache -------------------------------------------------------------------------------


class Cache:
    """Rotated keys and values (B, H, S, D) of every attention of a model. `layer(i)` attends for
    attention i: first over the prompts themselves, which it keeps, and once `filled` is set over
    all positions up to each row's own, one new token a row."""

    def __init__(self, capacity: int, positions: NDArray) -> None:
        self.capacity, self.filled = capacity, False
        self.positions = positions  # int32 (B,), of the tokens fed
        self.layers: set[int] = set()  # those that were asked for
        self.keys: dict[int, NDArray] = {}  # by layer: a model may have one twice
        self.values: dict[int, NDArray] = {}
        self.biases: dict[int, NDArray] = {}  # by layer, see CachedLayer.last_bias

    def layer(self, i: int) -> CachedLayer:
        self.layers.add(i)
        return CachedLayer(self, i)

    @property
    def serves(self) -> bool:
        """False after the prompts of a model whose attention, or a part of it, takes no cache."""
        return bool(self.keys) and self.layers == self.keys.keys()


class CachedLayer(NamedTuple):
    """Attention `i` over a cache (ops.attention.Cached)."""

    cache: Cache
    i: int

    def attend(self, packed: NDArray, cos: NDArray, sin: NDArray, into: NDArray) -> None:
        keys, values = self.cache.keys, self.cache.values
        batch, time, heads, _, size = packed.shape
        scale = 1 / math.sqrt(size)
        if self.cache.filled:
            packed = packed.reshape((batch, heads, 3, size))
            into = into.reshape((batch, heads, size))  # a view: T is 1
            positions = self.cache.positions
            cached = keys[self.i], values[self.i]
            _C.decode_attention(packed, cos, sin, positions, scale, *cached, into)
            return
        packed = packed.compact()
        _C.rotary(packed, cos[:time], sin[:time], 2, 1.0)
        q, k, v = qkv_parts(packed)
        for kept, new in (keys, k), (values, v):
            shape = batch, heads, self.cache.capacity, size
            kept[self.i] = empty(shape, packed.dtype, packed.device)  # read where it was written
            kept[self.i][:, :, :time] = new.permute((0, 2, 1, 3))
        _C.attention_fwd(q, k, v, scale, 1, into)

    def last_bias(self, b_o: NDArray, b2: NDArray) -> NDArray:
        """Add the biases once, with the prompts: each step reads the same sum."""
        known = self.cache.biases
        if self.i not in known:
            known[self.i] = _C.add(b_o, b2)
        return known[self.i]


class _Decoder:
    """Prompts, their cache, and the step that reads it. `capacity`: positions that will be fed."""

    def __init__(
        self, model: Any, contexts: list[list[int]], capacity: int, chooser: _Chooser
    ) -> None:
        self.model, self.contexts, self.chooser = model, contexts, chooser
        self.device, self.batch = model.device, len(contexts)
        self.tokens_now = zeros((self.batch,), "int32", self.device)
        self.positions = array(np.array([len(row) - 1 for row in contexts]), "int32", self.device)
        self.logits = full((self.batch, model.config.vocab_size), 0, "float32", self.device)
        capacity = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
        self.cache = Cache(capacity, self.positions)
        self.graph: _C.Graph | None = None

    def close(self) -> None:
        """Gives the graph back now: it and this object hold each other."""
        self.graph = None

    def tokens(self, count: int) -> Iterator[np.ndarray]:
        """Yield the next `count` tokens of each row, from which the next are computed; none where
        the model passes over the cache."""
        if not self._prefill():
            return
        on_device = self.chooser.on_device
        told = self.tokens_now if on_device else self.logits
        ahead = on_device and not self.device.is_host
        coming = _C.AsyncCopy(told)
        for left in range(count - 1, -1, -1):
            now = coming
            if ahead and left:  # the device starts on the next token before this one is read
                self._advance(left)
                coming = _C.AsyncCopy(told)
            values = now.wait().numpy()
            drawn = checked(values) if on_device else self.chooser.choose(values)
            yield drawn
            if left and not ahead:
                if not on_device:
                    self.tokens_now[:] = array(drawn, "int32", self.device)
                self._advance(left)
                coming = _C.AsyncCopy(told)

    def _advance(self, left: int) -> None:
        """One step; `left` are to come with it."""
        if self.graph is None and self.device.records_graphs and left >= STEPS_WORTH_RECORDING:
            self.graph = _C.Graph(self.device, self._step)
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    @no_grad()
    def _prefill(self) -> bool:
        """Compute the prompts. False where the model passes over the cache."""
        longest = max(map(len, self.contexts))
        ids = np.zeros((self.batch, longest), np.int32)
        for row, context in zip(ids, self.contexts):
            row[: len(context)] = context
        x = self.model.hidden(array(ids, "int32", self.device), self.cache).cached_data
        if not self.cache.serves:
            return False
        self.cache.filled = True
        ends = np.array([row * longest + len(c) - 1 for row, c in enumerate(self.contexts)])
        rows = x.reshape((self.batch * longest, x.shape[2]))
        self._finish(_C.embedding_fwd(array(ends, "int32", self.device), rows))
        return True

    @no_grad()
    def _step(self) -> None:
        x = self.model.hidden(self.tokens_now.reshape((self.batch, 1)), self.cache).cached_data
        self._finish(x.reshape((self.batch, x.shape[2])))

    def _finish(self, x: NDArray) -> None:
        """x (B, C), as the head reads it -> the chosen tokens, or the logits, and the next
        positions."""
        head, greedy = self.model.embed_out, self.chooser.on_device and self.chooser.state is None
        if type(head) is nn.Linear and head.bias is None:  # a recorded step reads its weight ahead
            weight = head.weight.cached_data
            if greedy:
                _C.decode_output_greedy(x, weight, self.tokens_now, self.positions)
                return
            logits = _C.decode_output(x, weight, None, None)
        else:
            logits = head(Tensor.from_ndarray(x)).cached_data
        if self.chooser.on_device:
            self.chooser.choose_there(logits, self.tokens_now, self.positions)
        else:
            self.logits[:] = logits
            self.positions += 1
