"""Evaluate a model on text: perplexity of a dataset, and the scoring underneath.

    needle evaluate CHECKPOINT_OR_FOLDER --data texts/ --stride 512

A token's score is -log p(token | the tokens before it), in nats. The loss is its mean, perplexity
its exponential, bits per byte the sum over ln 2 and the bytes of text that the tokens stand for:
the one number that compares models with different tokenizers.

Tokens beyond the model's context are read in windows of `seq_len` inputs that predict their last
`stride` targets. With stride = seq_len (the default) the windows tile the text, and a token sees
between 1 and seq_len others; a smaller stride lets each see at least seq_len - stride + 1, for
seq_len / stride times the work. The last window is moved back to be full, so each token is scored
exactly once; the first token of the data has nothing before it and is not scored.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from needle import _C, data, models
from needle.autograd import Tensor, no_grad
from needle.backend_ndarray import FLOAT_DTYPES, Device, choose_device
from needle.command import Parser, reporting, whole, wrapped
from needle.data.readers import open_tokens
from needle.data.tokens import in_memory, to_ids
from needle.files import naming
from needle.models import LanguageModel
from needle.models.registry import IMPORT, imported
from needle.processes import terminal_bar

# Elements of logits that exist at a time; float32 ones take four times as many bytes.
LOGITS = 1 << 26


@dataclass(frozen=True)
class Scores:
    """The result of `perplexity`."""

    tokens: int  # how many were scored
    nats: float  # the sum of their scores
    text_bytes: int | None  # of the tokens' text, where a tokenizer is known
    per_token: np.ndarray | None  # float32 (N,), where asked for; NaN where none was scored

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_dict(self) -> dict[str, float | int | None]:
        """Everything but the single tokens, as JSON has it."""
        return {
            "tokens": self.tokens,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bytes": self.text_bytes,
            "bits_per_byte": self.bits_per_byte,
        }


# ---- scoring ----------------------------------------------------------------------------------


def score(
    model: LanguageModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], batch_size: int = 8
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield, for each row (inputs, targets) whose last len(targets) inputs predict the targets:
    its index in `rows`, the log-probability of each target (float32, nats) and True where the
    target is the likeliest token (bool).

    Rows are taken longest first, `batch_size` together, so that a batch holds little padding and
    running out of memory shows at once; the padding is to the right, where causal attention never
    looks from. Raises ValueError for a row that is empty, longer than max_seq_len, or has fewer
    inputs than targets, before anything is computed.
    """
    for index, (inputs, targets) in enumerate(rows):
        if not 1 <= len(targets) <= len(inputs) <= model.config.max_seq_len:
            raise ValueError(
                f"score: row {index} has {len(inputs)} inputs and {len(targets)} targets; there "
                f"must be 1 <= targets <= inputs <= max_seq_len ({model.config.max_seq_len})"
            )
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = np.zeros((len(chosen), len(rows[chosen[0]][0])), np.int64)
        positions = []
        for row, index in enumerate(chosen):
            inputs, targets = rows[index]
            batch[row, : len(inputs)] = inputs
            end = row * batch.shape[1] + len(inputs)
            positions.append(np.arange(end - len(targets), end))
        wanted = np.concatenate([np.asarray(rows[index][1]) for index in chosen])
        logprobs, likeliest = _score_positions(model, batch, np.concatenate(positions), wanted)
        cuts = np.cumsum([len(one) for one in positions])[:-1]
        yield from zip(chosen, np.split(logprobs, cuts), np.split(likeliest, cuts))


def _score_positions(
    model: LanguageModel, batch: np.ndarray, positions: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and hits of `targets` (N,) at `positions` (N,) of the flattened batch
    (B, T). The head multiplies those positions alone, LOGITS numbers at a time."""
    vocabulary = model.config.vocab_size
    wrong = targets[(targets < 0) | (targets >= vocabulary)]
    if len(wrong):
        raise ValueError(f"score: target {wrong[0]} is outside the vocabulary of {vocabulary}")
    losses, likeliest = [], []
    with no_grad():
        hidden = model.final_hidden(batch).cached_data
        hidden = hidden.reshape((batch.size, hidden.shape[2]))
        step = max(1, LOGITS // vocabulary)
        for start in range(0, len(positions), step):
            here = _C.array(positions[start : start + step].astype(np.int32), "int32", model.device)
            wanted = _C.array(targets[start : start + step].astype(np.int32), "int32", model.device)
            rows = Tensor.from_ndarray(_C.embedding_fwd(here, hidden))
            logits = model.embed_out(rows).cached_data
            losses.append(_C.cross_entropy_fwd(logits, wanted)[0].numpy())
            likeliest.append(logits.argmax(1).numpy())
    return -np.concatenate(losses), np.concatenate(likeliest) == targets


# ---- perplexity -------------------------------------------------------------------------------


def windows(count: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, n): inputs [first, last) predict targets [last - n + 1, last + 1), for `count`
    tokens in a row; see the head of this file.

    >>> list(ndl.evaluate.windows(9, seq_len=4, stride=3))
    [(0, 4, 4), (3, 7, 3), (4, 8, 1)]
    """
    scored = 1
    while scored < count:
        n = min(stride if scored > 1 else seq_len, count - scored)
        scored += n
        yield max(0, scored - 1 - seq_len), scored - 1, n


def perplexity(
    model: LanguageModel,
    tokens: data.FlatTokens | np.ndarray,
    seq_len: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    tokenizer: object | None = None,
    row_length: int | None = None,
    per_token: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Scores of `tokens` (N,), integers in memory or in files, read as one text.

    seq_len: inputs a window, by default max_seq_len; stride: targets a window, by default seq_len.
    tokenizer: a `data.Tokenizer`, for bytes. row_length: the tokens are rows of that length
    which do not go on in one another. per_token: keep each token's score (4 bytes a token).
    progress(n) is called after each n tokens. Raises ValueError for sizes that cannot be and for
    tokens too few or outside the vocabulary (DataError, with file and offset where it has them).

    >>> config = ndl.PythiaConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2)
    >>> model = ndl.Pythia(config)
    >>> scores = ndl.evaluate.perplexity(model, np.arange(50), stride=16)
    >>> scores.tokens, scores.perplexity > 1
    (49, True)
    """
    limit, tokens = model.config.max_seq_len, in_memory(tokens)
    seq_len = limit if seq_len is None else seq_len
    stride = seq_len if stride is None else stride
    if not 1 <= stride <= seq_len <= limit:
        raise ValueError(
            f"perplexity: 1 <= stride ({stride}) <= seq_len ({seq_len}) <= max_seq_len ({limit}) "
            "of the model must hold"
        )
    if batch_size < 1:
        raise ValueError(f"perplexity: batch_size must be 1 or more, not {batch_size}")
    row_length = row_length or len(tokens)
    if min(row_length, len(tokens)) < 2:
        raise ValueError(
            f"perplexity: {min(row_length, len(tokens))} tokens; the first is never "
            "scored, so there must be two or more"
        )
    lengths = None
    if tokenizer is not None:
        lengths = data.token_bytes(tokenizer)
        # Vocabularies are padded: an id that the tokenizer lacks stands for no text.
        lengths = np.pad(lengths, (0, max(0, model.config.vocab_size - len(lengths))))
    kept = np.full(len(tokens), np.nan, np.float32) if per_token else None
    count, nats, text_bytes = 0, 0.0, 0
    below = {"vocab_size": model.config.vocab_size}
    rest = (
        (start + first, start + last, n)
        for start in range(0, len(tokens), row_length)
        for first, last, n in windows(min(row_length, len(tokens) - start), seq_len, stride)
    )
    while batch := list(itertools.islice(rest, batch_size)):
        texts = [to_ids(tokens.read((first, last + 1), **below)) for first, last, _ in batch]
        rows = [(text[:-1], text[-n:]) for text, (_, _, n) in zip(texts, batch)]
        for index, logprobs, _ in score(model, rows, batch_size):
            _, last, n = batch[index]
            nats -= float(logprobs.sum(dtype=np.float64))
            if kept is not None:
                kept[last - n + 1 : last + 1] = -logprobs
        done = sum(n for _, _, n in batch)
        count += done
        if lengths is not None:
            text_bytes += sum(int(lengths[targets].sum()) for _, targets in rows)
        if progress is not None:
            progress(done)
    return Scores(count, nats, None if lengths is None else text_bytes, kept)


# ---- from files -------------------------------------------------------------------------------


def load_model(
    path: str | Path, device: Device | None = None, dtype: str | None = None
) -> tuple[LanguageModel, data.Tokenizer | None]:
    """A model in evaluation mode, and its tokenizer, where it came with one.

    path: as `models.from_pretrained` takes it. dtype: float32, bfloat16 or float16; by default
    that of the checkpoint, of a model of transformers float32. Raises the errors of
    `models.from_pretrained`, which name the file.
    """
    model = models.from_pretrained(path, device, dtype)
    return model, model.tokenizer


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="needle evaluate", description="Perplexity of a model on a dataset.")
    add, count = top.add_argument, {"type": whole(1)}
    text = "a checkpoint, the folder of a run, or a folder that transformers saved"
    add("model", metavar="CHECKPOINT_OR_FOLDER", help=text)
    text = "text or tokens, of any kind that needle.data reads"
    add("--data", required=True, metavar="PATH", help=text)
    text = "of the data: all (default), or a part as training divides it"
    add("--split", choices=("all", "train", "held-out"), default="all", help=text)
    text = "a tokenizer.json; by default the one that came with the model"
    add("--tokenizer", metavar="PATH", help=text)
    text = "the token that ends a document; by default as the tokenizer's files name it"
    add("--end-of-text", metavar="TOKEN", help=text)
    text = "tokens of context a window; by default all the model can read"
    add("--seq-len", **count, metavar="T", help=text)
    text = "score the last S tokens of each window only, each with a context of at least T - S + 1"
    add("--stride", **count, metavar="S", help=f"{text}; by default T")
    add("--batch-size", **count, default=8, metavar="N", help="windows at a time (default: 8)")
    add("--limit", **count, metavar="N", help="the first N tokens only")
    text = "write the score of each token as float32 to FILE (.npy); NaN where a text begins"
    add("--per-token", metavar="FILE", help=text)
    text = "auto (default), cpu, cuda or cuda:INDEX"
    add("--device", default="auto", metavar="NAME", help=text)
    text = "compute in this; by default in that of the checkpoint"
    add("--dtype", choices=FLOAT_DTYPES, help=text)
    add("--import", type=imported, metavar="FILE", help=IMPORT)
    add("--json", action="store_true", help="one JSON object instead of the table")
    return top


def evaluate(args: argparse.Namespace) -> Scores:
    """The command, between reading its arguments and printing."""
    model, beside = load_model(args.model, choose_device(args.device), args.dtype)
    tokenizer = beside if args.tokenizer is None else args.tokenizer
    if tokenizer is not None:
        tokenizer = data.load_tokenizer(tokenizer, args.end_of_text)
    elif open_tokens(args.data) is None:
        raise data.DataError(
            f"{args.data} is text, and no tokenizer.json lies with {args.model}: "
            "give the one that it was trained with, by --tokenizer"
        )
    elif args.end_of_text is not None:
        raise data.DataError(
            f"--end-of-text: no tokenizer.json lies with {args.model}: give --tokenizer"
        )
    with contextlib.redirect_stdout(sys.stderr):  # it says when it tokenises; ours is the result
        opened = data.open_data(args.data, tokenizer=tokenizer)
    print(wrapped(f"{model}\n{opened.source}\n{tokenizer or 'no tokenizer'}"), file=sys.stderr)
    # Texts of their own: the held-out tokens do not continue those of training.
    splits = {"train": opened.train, "held-out": opened.held_out, "test": opened.test}
    texts = [text for name, text in splits.items() if text and args.split in ("all", name)]
    left = sum(map(len, texts)) if args.limit is None else args.limit
    parts = []
    for text in texts:
        row_length = text.row_length if isinstance(text, data.Documents) else None
        if left < len(text):
            text = text.between(0, left)
        left -= len(text)
        if len(text) > 1:
            sizes, kept = (args.seq_len, args.stride, args.batch_size), bool(args.per_token)
            bar = terminal_bar(total=len(text), unit=" tokens", leave=False)
            report = None if bar is None else bar.update
            parts.append(perplexity(model, text, *sizes, tokenizer, row_length, kept, report))
            if bar is not None:
                bar.close()
        elif len(text) == 1:
            parts.append(Scores(0, 0.0, 0, np.full(1, np.nan, np.float32)))
    if not any(part.tokens for part in parts):
        raise data.DataError(
            f"{args.data}: fewer than two tokens in the part that was asked for "
            f"(--split {args.split}); nothing to score"
        )
    return Scores(
        sum(p.tokens for p in parts),
        sum(p.nats for p in parts),
        None if tokenizer is None else sum(p.text_bytes for p in parts),
        np.concatenate([p.per_token for p in parts]) if args.per_token else None,
    )


@reporting("needle evaluate")
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.per_token and not Path(args.per_token).absolute().parent.is_dir():
        raise data.DataError(f"--per-token {args.per_token}: there is no such folder")
    scores = evaluate(args)
    if args.per_token:
        # np.save by name would add a suffix.
        with naming(args.per_token), open(args.per_token, "wb") as file:
            np.save(file, scores.per_token)
    if args.json:
        print(json.dumps(scores.to_dict()))
        return 0
    print(f"tokens          {scores.tokens:,}")
    print(f"loss            {scores.loss:.5f} nats a token")
    print(f"perplexity      {scores.perplexity:.4f}")
    if scores.bits_per_byte is not None:
        print(f"bits per byte   {scores.bits_per_byte:.5f} over {scores.text_bytes:,} bytes")
    return 0
