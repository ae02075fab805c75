"""Held-out loss of a run, in batches that its ranks share."""

from __future__ import annotations

import math

from needle.autograd import no_grad
from needle.data import Batches, DataError, TokenData, token_bytes
from needle.distributed.data_parallel import DataParallel
from needle.models.language import LanguageModel
from needle.training.heartbeat import beat
from needle.training.ranks import own_columns
from needle.training.settings import Settings

# The most tokens, and the most batches, of an evaluation.
EVAL_TOKENS = {"cpu": 1 << 15, "cuda": 1 << 19}
EVAL_BATCHES = 32


def evaluate(
    model: LanguageModel, data: TokenData, settings: Settings, parallel: DataParallel
) -> dict[str, float]:
    """Return val_loss in nats a token, and val_bits_per_byte if the tokenizer is known.

    The result is empty if the held-out data are shorter than a sequence. DataError and OSError are
    raised after the ranks have met.
    """
    tokens = data.held_out
    length = settings.seq_len
    rows = min(settings.batch_size, max(len(tokens) - 1, 0) // length)
    if rows == 0:
        return {}
    ranks, context = parallel.group, parallel.context
    held_out = Batches(tokens, rows, length, vocab_size=model.config.vocab_size)
    held_out.share(range(1), 1, own_columns(length, ranks, context))
    most = EVAL_TOKENS["cpu" if model.device.is_host else "cuda"]
    limit = min(max(most // (rows * length), 1), EVAL_BATCHES)
    sizes = None if data.tokenizer is None else token_bytes(data.tokenizer)
    nats, count, text_bytes, failure = [], 0, 0, None
    model.eval()
    try:
        drawn, shares = list(held_out.in_order(limit)), ranks.size // context
        for number in range(ranks.rank // context, -(-len(drawn) // shares) * shares, shares):
            if number >= len(drawn) and context == 1:
                break
            ids, targets = drawn[min(number, len(drawn) - 1)]
            with no_grad():
                loss = float(model.loss(ids, targets).numpy())
            beat()
            if number < len(drawn):  # else for ranks that share sequences, which all run the layers
                nats.append(loss * targets.size)
                count += targets.size
                text_bytes += 0 if sizes is None else int(sizes[targets].sum())
    except (DataError, OSError) as error:
        failure = error
    model.train()
    told = ranks.gather("the evaluation", [nats, count, text_bytes])
    nats = [part for parts, _, _ in told for part in parts]
    count, text_bytes = (sum(theirs) for theirs in list(zip(*told))[1:])
    if failure is not None:
        raise failure
    result = {"val_loss": math.fsum(nats) / count} if count else {}
    if text_bytes:
        result["val_bits_per_byte"] = math.fsum(nats) / math.log(2) / text_bytes
    return result
