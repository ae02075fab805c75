"""Wrong calls, of which only the operation knows: op, label, changes to the first case's inputs,
exception, what the message says. (What every structured op must refuse, test_bad_inputs.py makes
from the table: an axis that differs, a missing axis, a wrong dtype, no array at all.)"""

import numpy as np


def long_ids(n, bad):
    ids = np.zeros(n, np.int64)
    ids[n // 2] = bad
    return ids


BAD = [
    (
        "sort",
        "more than all",
        {"values": np.ones((31, 258)), "indices": np.ones((31, 258))},
        ValueError,
        r"sort: the first 258 of 257 elements",
    ),
    (
        "layernorm_bwd",
        "a residual of another size",
        {"dres": np.ones((2, 3))},
        ValueError,
        r"layernorm_bwd: dres: axis N is 2",
    ),
    (
        "layernorm_pair_fwd",
        "weights of two sizes",
        {"w2": np.ones(2)},
        ValueError,
        r"layernorm_pair_fwd: w2: axis C is 2",
    ),
    (
        "layernorm_pair_bwd",
        "a residual of another size",
        {"dres": np.ones((31, 4))},
        ValueError,
        r"layernorm_pair_bwd: dres: axis C is 4",
    ),
    (
        "matmul",
        "inner sizes",
        {"a": np.ones((1, 2, 3)), "b": np.ones((1, 4, 5))},
        ValueError,
        r"matmul: b: axis K",
    ),
    (
        "matmul",
        "one without B",
        {"a": np.ones((2, 3)), "b": np.ones((1, 3, 5))},
        ValueError,
        r"matmul: b: has 3 axes, must have 2: \(K, N\)",
    ),
    (
        "matmul",
        "the other without B",
        {"a": np.ones((1, 2, 3)), "b": np.ones((3, 5))},
        ValueError,
        r"matmul: b: has 2 axes, must have 3: \(B, K, N\)",
    ),
    (
        "rotary",
        "rotates more than D",
        {"x": np.ones((1, 3, 1, 3, 4)), "cos": np.ones((3, 3)), "sin": np.ones((3, 3))},
        ValueError,
        r"rotary: cos",
    ),
    ("rotary", "more parts than P", {"parts": 4}, ValueError, r"rotary: parts"),
    ("rotary", "negative parts", {"parts": -1}, ValueError, r"rotary: parts"),
    (
        "linear_rotary_fwd",
        "rotates more than D",
        {n: np.ones((31, 9)) for n in ("cos", "sin")},
        ValueError,
        r"linear_rotary_fwd: cos: .*9.* but a head has 16 \(give at most D / 2 angles\)",
    ),
    (
        "linear_rotary_fwd",
        "angles of fewer positions",
        {n: np.ones((30, 2)) for n in ("cos", "sin")},
        ValueError,
        r"linear_rotary_fwd: cos: axis T is 30, but was 31",
    ),
    (
        "linear_rotary_fwd",
        "another order of the bias",
        {"b": np.ones((3, 16, 3))},
        ValueError,
        r"linear_rotary_fwd: b: axis P is 16",
    ),
    *(
        (
            "linear_rotary_fwd",
            label,
            {"parts": n},
            ValueError,
            r"linear_rotary_fwd: parts: .*0 .* 3",
        )
        for label, n in [("more parts than P", 4), ("negative parts", -1)]
    ),
    (
        "attention_fwd",
        "head dim 257",
        {n: np.ones((1, 2, 1, 257)) for n in "qkvo"},
        ValueError,
        r"attention_fwd: .*256",
    ),
    (
        "block_sparse_attention_fwd",
        "block 0",
        {"block": 0},
        ValueError,
        r"block_sparse_attention_fwd: block",
    ),
    (
        "block_sparse_attention_fwd",
        "too few query blocks",
        {"offsets": np.zeros((3, 2))},
        ValueError,
        r"block_sparse_attention_fwd: offsets",
    ),
    (
        "block_sparse_attention_fwd",
        "two masks for three heads",
        {
            "q": np.ones((1, 80, 3, 4)),
            "k": np.ones((1, 80, 3, 4)),
            "v": np.ones((1, 80, 3, 4)),
            "o": np.ones((1, 80, 3, 4)),
            "offsets": np.zeros((2, 6)),
            "order": np.zeros((2, 5)),
        },
        ValueError,
        r"block_sparse_attention_fwd: offsets",
    ),
    (
        "block_sparse_attention_fwd",
        "an order of too few blocks",
        {"order": np.zeros((3, 4))},
        ValueError,
        r"block_sparse_attention_fwd: order: names 4 blocks a mask, but there are 5",
    ),
    (
        "block_sparse_attention_bwd",
        "a transposed order of too many blocks",
        {"order_t": np.zeros((3, 6))},
        ValueError,
        r"block_sparse_attention_bwd: order_t: names 6 blocks a mask, but there are 5",
    ),
    *(
        (
            "attention_bwd",
            f"angles, and {keys} keys",
            {n: np.ones((2, keys, 3, 16)) for n in ("k", "v", "dk", "dv")},
            ValueError,
            rf"attention_bwd: cos: the angles of 31 positions .* but there are {keys} keys",
        )
        for keys in (30, 40)
    ),
    *(
        (op, f"no {name}", {name: None}, ValueError, rf"{op}: {name}: must be given with")
        for op in ("attention_bwd", "block_sparse_attention_bwd")
        for name in ("cos", "sin")
    ),
    *(
        (
            op,
            "turns more than D",
            {n: np.ones((t, 9)) for n in ("cos", "sin")},
            ValueError,
            rf"{op}: cos: 9 angles rotate 18 dims, but a head has",
        )
        for op, t in (("attention_bwd", 31), ("block_sparse_attention_bwd", 77))
    ),
    *(
        (
            op,
            "two parts of db",
            {"db": np.ones((3, 2, d))},
            ValueError,
            rf"{op}: db: must be \(H, 3, D\), of dq, dk and dv, but has 2 parts",
        )
        for op, d in (("attention_bwd", 16), ("block_sparse_attention_bwd", 9))
    ),
    (
        "block_lists",
        "as many offsets as rows",
        {"offsets": np.zeros((3, 31))},
        ValueError,
        r"block_lists: offsets: axis P is 31, but 31 rows need 32",
    ),
    (
        "decode_attention",
        "two slices",
        {"qkv": np.ones((3, 2, 2, 16))},
        ValueError,
        r"decode_attention: qkv: axis P",
    ),
    (
        "decode_attention",
        "head dim 257",
        {
            "qkv": np.ones((3, 2, 3, 257)),
            "keys": np.ones((3, 2, 37, 257)),
            "values": np.ones((3, 2, 37, 257)),
        },
        ValueError,
        r"decode_attention: .*256",
    ),
    (
        "decode_attention",
        "rotates more than D",
        {n: np.ones((37, 9)) for n in ("cos", "sin")},
        ValueError,
        r"decode_attention: cos",
    ),
    ("decode_greedy", "no tokens", {"logits": np.ones((31, 0))}, ValueError, r"decode_greedy: log"),
    ("adamw", "step 0", {"step": 0}, ValueError, r"adamw: step"),
]
# Values that the CPU looks at; CUDA, where no value can be read without waiting, gives NaN instead.
BAD_VALUES = [
    (
        "decode_attention",
        "position S",
        {"positions": np.array([1, 37, 2])},
        r"decode_attention: positions: row 1 is at 37",
    ),
    (
        "decode_attention",
        "position -1",
        {"positions": np.array([-1, 1, 2])},
        r"decode_attention: positions: row 0 is at -1",
    ),
    (
        "decode_attention",
        "position X",
        {n: np.ones((20, 4)) for n in ("cos", "sin")} | {"positions": np.array([1, 2, 20])},
        r"decode_attention: positions: row 2 is at 20",
    ),
    (
        "block_sparse_attention_fwd",
        "a block that is not there",
        {"columns": long_ids(29, 1_000_000)},
        r"block_sparse_attention_fwd: .*lists block 1000000",
    ),
    (
        "block_sparse_attention_fwd",
        "the block after the last",
        {"columns": long_ids(29, 5)},
        r"block_sparse_attention_fwd: .*lists block 5 at 14",
    ),
    (
        "block_sparse_attention_fwd",
        "an order with a block after the last",
        {"order": np.tile([0, 1, 2, 3, 5], (3, 1))},
        r"block_sparse_attention_fwd: order: names block 5 at 4",
    ),
    (
        "block_sparse_attention_bwd",
        "an order with a block twice",
        {"order_t": np.tile([0, 1, 2, 1, 4], (3, 1))},
        r"block_sparse_attention_bwd: order_t: names block 1 at 3",
    ),
    (
        "block_lists",
        "too many entries",
        {"entries": np.zeros(5000)},
        r"block_lists: entries: axis E is 5000, but \d+ blocks are kept",
    ),
    (
        "block_lists",
        "too few entries",
        {"entries": np.zeros(5)},
        r"block_lists: entries: axis E is 5, but \d+ blocks are kept",
    ),
    ("embedding_fwd", "id -1", {"ids": long_ids(31, -1)}, r"embedding_fwd: ids: .*-1"),
    ("embedding_fwd", "id V", {"ids": long_ids(31, 257)}, r"embedding_fwd: ids: .*257"),
    ("embedding_bwd", "id V", {"ids": long_ids(31, 257)}, r"embedding_bwd: ids: .*257"),
    (
        "cross_entropy_fwd",
        "target V",
        {"targets": long_ids(31, 257)},
        r"cross_entropy_fwd: targets: .*257",
    ),
    (
        "cross_entropy_fwd_bwd",
        "target V",
        {"targets": long_ids(31, 257)},
        r"cross_entropy_fwd_bwd: targets: .*257",
    ),
    (
        "cross_entropy_bwd",
        "target V",
        {"targets": long_ids(31, 257)},
        r"cross_entropy_bwd: targets: .*257",
    ),
]
