"""Wrong calls, of which only the operation knows: {op: {label: (changes to the first case's inputs,
what the ValueError says after the op)}}. (What every structured op must refuse, test_bad_inputs.py
makes from the table: an axis that differs, a missing axis, a wrong dtype, no array at all.)"""

import numpy as np


def ones(*shape):
    return np.ones(shape)


def angles(*shape):
    return {"cos": np.ones(shape), "sin": np.ones(shape)}


def long_ids(n, bad):
    ids = np.zeros(n, np.int64)
    ids[n // 2] = bad
    return ids


BACKWARD = {  # positions and head dim of either attention's first case
    op: {
        "no cos": ({"cos": None}, "cos: must be given with"),
        "no sin": ({"sin": None}, "sin: must be given with"),
        "turns more than D": (angles(t, 9), "cos: 9 angles rotate 18 dims, but a head has"),
        "two parts of db": (
            {"db": ones(3, 2, d)},
            r"db: must be \(H, 3, D\), of dq, dk and dv, but has 2 parts",
        ),
    }
    for op, t, d in (("attention_bwd", 31, 16), ("block_sparse_attention_bwd", 77, 9))
}
BAD = {
    "sort": {
        "more than all": (
            {"values": ones(31, 258), "indices": ones(31, 258)},
            "the first 258 of 257 elements",
        )
    },
    "layernorm_bwd": {"a residual of another size": ({"dres": ones(2, 3)}, "dres: axis N is 2")},
    "layernorm_pair_fwd": {"weights of two sizes": ({"w2": ones(2)}, "w2: axis C is 2")},
    "decode_projections": {
        "more than 4 rows": (
            {"x": ones(5, 776), "g": ones(5, 40)},
            r"x: is \(5, 776\), but must have at most 4 rows",
        ),
        "more than 1024 columns": (
            {"x": ones(2, 1032), "w_qkv": ones(1032, 24), "w1": ones(1032, 40)}
            | {n: ones(1032) for n in ("norm_w1", "norm_b1", "norm_w2", "norm_b2")},
            r"x: is \(2, 1032\), .* 8 to 1024 columns",
        ),
        "columns of g of no multiple": (
            {"w1": ones(776, 12), "b1": ones(12), "g": ones(2, 12)},
            "w1: has 12 columns, but must have a multiple of 8",
        ),
        "columns of packed of no multiple": (
            {"w_qkv": ones(776, 12), "b_qkv": ones(12)},
            "w_qkv: has 12 columns, but must have a multiple of 8",
        ),
    },
    "layernorm_pair_bwd": {
        "a residual of another size": ({"dres": ones(31, 4)}, "dres: axis C is 4")
    },
    "layernorm_pair_fp8": {
        "rows of no multiple": ({"x": ones(24, 48)}, r"x: \(24, 48\), but .* multiples of 16"),
        "columns of no multiple": (
            {"x": ones(16, 40)} | {n: ones(40) for n in ("w1", "b1", "w2", "b2")},
            r"x: \(16, 40\), but .* multiples of 16",
        ),
    },
    "fp8_linear_gelu_fwd": {
        "rows of no multiple": ({"x": ones(24, 16)}, r"x: \(24, 16\), but .* multiples of 16"),
        "no rows": ({"x": ones(0, 16)}, r"x: \(0, 16\), but .* multiples of 16 above 0"),
        "columns of no multiple": (
            {"w": ones(24, 16), "b": ones(24)},
            r"w: \(24, 16\), but .* multiples of 16",
        ),
    },
    "fp8_linear_gelu_bwd": {
        "rows of no multiple": (
            {"d": ones(24, 16), "dgelu": ones(24, 16)},
            r"d: \(24, 16\), but .* multiples of 16",
        ),
        "columns of no multiple": (
            {"w": ones(24, 16), "dgelu": ones(16, 24), "db": ones(24)},
            r"w: \(24, 16\), but .* multiples of 16",
        ),
    },
    "fp8_layer_weights": {
        "inner columns of no multiple": (
            {"w1": ones(16, 24), "b1": ones(24), "w2": ones(24, 16)},
            r"w1: \(16, 24\), but .* multiples of 16 above 0",
        ),
        "no rows": ({"w_o": ones(0, 16)}, r"w_o: \(0, 16\), but .* multiples of 16 above 0"),
    },
    "matmul": {
        "inner sizes": ({"a": ones(1, 2, 3), "b": ones(1, 4, 5)}, "b: axis K"),
        "one without B": (
            {"a": ones(2, 3), "b": ones(1, 3, 5)},
            r"b: has 3 axes, must have 2: \(K, N\)",
        ),
        "the other without B": (
            {"a": ones(1, 2, 3), "b": ones(3, 5)},
            r"b: has 2 axes, must have 3: \(B, K, N\)",
        ),
    },
    "rotary": {
        "rotates more than D": ({"x": ones(1, 3, 1, 3, 4), **angles(3, 3)}, "cos"),
        "more parts than P": ({"parts": 4}, "parts"),
        "negative parts": ({"parts": -1}, "parts"),
    },
    "linear_rotary_fwd": {
        "rotates more than D": (
            angles(31, 9),
            r"cos: .*9.* but a head has 16 \(give at most D / 2 angles\)",
        ),
        "angles of fewer positions": (angles(30, 2), "cos: axis T is 30, but was 31"),
        "another order of the bias": ({"b": ones(3, 16, 3)}, "b: axis P is 16"),
        "more parts than P": ({"parts": 4}, "parts: .*0 .* 3"),
        "negative parts": ({"parts": -1}, "parts: .*0 .* 3"),
    },
    "attention_fwd": {"head dim 257": ({n: ones(1, 2, 1, 257) for n in "qkvo"}, ".*256")},
    "block_sparse_attention_fwd": {
        "block 0": ({"block": 0}, "block"),
        "too few query blocks": ({"offsets": np.zeros((3, 2))}, "offsets"),
        "two masks for three heads": (
            {n: ones(1, 80, 3, 4) for n in "qkvo"}
            | {"offsets": np.zeros((2, 6)), "order": np.zeros((2, 5))},
            "offsets",
        ),
        "an order of too few blocks": (
            {"order": np.zeros((3, 4))},
            "order: names 4 blocks a mask, but there are 5",
        ),
    },
    "block_sparse_attention_bwd": {
        "a transposed order of too many blocks": (
            {"order_t": np.zeros((3, 6))},
            "order_t: names 6 blocks a mask, but there are 5",
        ),
        **BACKWARD["block_sparse_attention_bwd"],
    },
    "attention_bwd": {
        f"angles, and {keys} keys": (
            {n: ones(2, keys, 3, 16) for n in ("k", "v", "dk", "dv")},
            f"cos: the angles of 31 positions .* but there are {keys} keys",
        )
        for keys in (30, 40)
    }
    | BACKWARD["attention_bwd"],
    "block_lists": {
        "as many offsets as rows": (
            {"offsets": np.zeros((3, 31))},
            "offsets: axis P is 31, but 31 rows need 32",
        )
    },
    "decode_attention": {
        "two slices": ({"qkv": ones(3, 2, 2, 16)}, "qkv: axis P"),
        "head dim 257": (
            {"qkv": ones(3, 2, 3, 257), "o": ones(3, 2, 257)}
            | {n: ones(3, 2, 37, 257) for n in ("keys", "values")},
            ".*256",
        ),
        "rotates more than D": (angles(37, 9), "cos"),
    },
    "kept_blocks": {
        "block 0": ({"block": 0}, "block: is 0, but must be above 0"),
        "too few rows of blocks": (
            {"kept": ones(3, 4, 3)},
            "kept: axis R is 4, but 70 tokens need 5",
        ),
        "too many columns": ({"kept": ones(3, 5, 4)}, "kept: axis C is 4, but 45 tokens need 3"),
    },
    "leaf_hashes": {
        "a leaf too few": ({"hashes": np.zeros((292, 8))}, r"hashes: is \(292, 8\), but 300001"),
        "4 words": ({"hashes": np.zeros((293, 4))}, r"hashes: is \(293, 4\), but"),
    },
    "random_bits": {
        "two numbers": ({"state": np.zeros(2)}, "state: axis S is 2, but .* 3 numbers")
    },
    "random_tokens": {
        "no tokens": ({"logits": ones(31, 0)}, "logits: 0 tokens"),
        "no temperature": ({"temperature": 0.0}, "temperature: must be above 0, but is 0"),
        "temperature NaN": ({"temperature": np.nan}, "temperature: must be above 0"),
        "two numbers": ({"state": np.zeros(2)}, "state: axis S is 2, but .* 3 numbers"),
    },
    "dropout_fwd": {
        "p 1": ({"p": 1.0}, r"p: must be in \[0, 1\), but is 1"),
        "p below 0": ({"p": -0.5}, r"p: must be in \[0, 1\), but is -0.5"),
        "p NaN": ({"p": np.nan}, r"p: must be in \[0, 1\), but is -?nan"),
        "four numbers": ({"state": np.zeros(4)}, "state: axis S is 4, but .* 3 numbers"),
    },
    "dropout_bwd": {
        "p 1": ({"p": 1.0}, r"p: must be in \[0, 1\), but is 1"),
        "no number": ({"drawn": np.zeros(0)}, "drawn: axis S is 0, but .* 3 numbers"),
    },
    "decode_greedy": {"no tokens": ({"logits": ones(31, 0)}, "log")},
    "adamw": {"step 0": ({"step": 0}, "step")},
}
# Values that the CPU looks at; CUDA, where no value can be read without waiting, gives NaN instead.
BAD_VALUES = {
    "decode_attention": {
        "position S": ({"positions": np.array([1, 37, 2])}, "positions: row 1 is at 37"),
        "position -1": ({"positions": np.array([-1, 1, 2])}, "positions: row 0 is at -1"),
        "position X": (
            angles(20, 4) | {"positions": np.array([1, 2, 20])},
            "positions: row 2 is at 20",
        ),
    },
    "block_sparse_attention_fwd": {
        "a block that is not there": (
            {"columns": long_ids(29, 1_000_000)},
            ".*lists block 1000000",
        ),
        "the block after the last": ({"columns": long_ids(29, 5)}, ".*lists block 5 at 14"),
        "an order with a block after the last": (
            {"order": np.tile([0, 1, 2, 3, 5], (3, 1))},
            "order: names block 5 at 4",
        ),
    },
    "block_sparse_attention_bwd": {
        "an order with a block twice": (
            {"order_t": np.tile([0, 1, 2, 1, 4], (3, 1))},
            "order_t: names block 1 at 3",
        )
    },
    "block_lists": {
        f"{n} entries": ({"entries": np.zeros(n)}, rf"entries: axis E is {n}, but \d+ blocks are k")
        for n in (5, 5000)
    },
    "embedding_fwd": {
        f"id {bad}": ({"ids": long_ids(31, bad)}, f"ids: .*{bad}") for bad in (-1, 257)
    },
    "embedding_bwd": {"id V": ({"ids": long_ids(31, 257)}, "ids: .*257")},
    **{
        f"cross_entropy_{op}": {"target V": ({"targets": long_ids(31, 257)}, "targets: .*257")}
        for op in ("fwd", "fwd_bwd")
    },
}
