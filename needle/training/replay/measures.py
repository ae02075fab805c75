"""What differs between two models: losses by document, divergences, distances of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from needle import models
from needle.autograd import Tensor, no_grad
from needle.training.evaluate import windows

LOGITS = 1 << 22  # numbers of logits that are looked at together, in float64
Row = dict[str, Any]


def _log_probabilities(
    model: models.LanguageModel, ids: np.ndarray, count: int
) -> Iterator[np.ndarray]:
    """Yield the log-probabilities of the tokens behind the last `count` ids, float64 (n, V), some
    rows at a time; gradients must be off."""
    hidden = model.final_hidden(ids[None]).cached_data
    hidden = hidden.reshape(hidden.shape[1:])[len(ids) - count :]
    step = max(1, LOGITS // model.config.vocab_size)
    for start in range(0, count, step):
        part = Tensor.from_ndarray(hidden[start : start + step])
        logits = model.embed_out(part).cached_data.astype("float32").numpy().astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(1, keepdims=True))


@no_grad()
def losses(
    model: models.LanguageModel, texts: list[np.ndarray], reference: models.LanguageModel
) -> np.ndarray:
    """Return (documents, 4): tokens that are scored, nats of the model and of the reference, and
    KL(reference || model), each the sum over the tokens of a document. The first token of a
    document is not scored; longer ones are read in windows."""
    found = np.zeros((len(texts), 4))
    for row, ids in zip(found, texts):
        for first, last, count in windows(len(ids), (t := model.config.max_seq_len), t):
            pair = [_log_probabilities(m, ids[first:last], count) for m in (model, reference)]
            at = last - count + 1
            for own, theirs in zip(*pair):
                each = np.arange(len(own)), ids[at : at + len(own)]
                kl = (np.exp(theirs) * (theirs - own)).sum()
                row += len(own), -own[each].sum(), -theirs[each].sum(), kl
                at += len(own)
    return found


def loss_rows(found: np.ndarray) -> Iterator[Row]:
    """Yield the numbers of `losses` by document, then of all."""
    total = found.sum(0, keepdims=True)
    for document, row in enumerate(np.concatenate([found, total])):
        tokens, own, theirs, kl = row.tolist()
        each = {"loss": own, "difference": own - theirs, "kl": kl}
        name = document if document < len(found) else "all"
        means = {key: value / tokens if tokens else None for key, value in each.items()}
        yield {"document": name, "tokens": int(tokens), **means}


def distances(model: models.LanguageModel, reference: models.LanguageModel) -> Iterator[Row]:
    """Yield the distance of the weights by layer, then of all."""
    sums: dict[str, np.ndarray] = {}
    theirs = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        a, b = (x.numpy().astype(np.float64) for x in (p, theirs[name]))
        part = re.match(r"\w+\.\d+|\w+", name)[0]
        for key in part, "all":
            squares = np.array([((a - b) ** 2).sum(), (b**2).sum()])
            sums[key] = sums.get(key, 0) + squares
    for part in [*(key for key in sums if key != "all"), "all"]:
        distance, norm = np.sqrt(sums[part]).tolist()
        yield {"layer": part, "distance": distance, "relative": distance / norm if norm else None}
