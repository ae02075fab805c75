"""Wrong calls, of which only the operation knows: (op, changes to its first case's inputs, words of
the ValueError after the op). What every structured op must refuse, test_bad_inputs.py makes from
the table: an axis that differs, a missing axis, a wrong dtype, no array at all."""

import numpy as np

zeros, each = np.zeros, dict.fromkeys


def ones(*shape):
    return np.ones(shape)


def angles(*shape):
    return {"cos": np.ones(shape), "sin": np.ones(shape)}


def long_ids(n, bad):
    ids = np.zeros(n, np.int64)
    ids[n // 2] = bad
    return ids


def of_16(op: str, operand: str, **shapes) -> tuple:
    """A call in which `operand` has sizes that are no multiples of 16 above 0."""
    rows, columns = shapes[operand]
    changes = {name: ones(*shape) for name, shape in shapes.items()}
    return op, changes, rf"{operand}: (is )?\({rows}, {columns}\), but .* multiples of 16"


NORMS = ["norm_w1", "norm_b1", "norm_w2", "norm_b2"]
BAD = [
    ("sort", each(["values", "indices"], ones(31, 258)), "the first 258 of 257 elements"),
    ("fp8_matmul", {"a_e5m2": 1, "b_e5m2": 1}, "b_e5m2: a and b are both e5m2"),
    of_16("layernorm_pair_fp8", "x", x=(24, 48)),
    of_16("layernorm_pair_fp8", "x", x=(16, 40), **each(NORMS, (40,))),
    of_16("fp8_linear_gelu_fwd", "x", x=(24, 16)),
    of_16("fp8_linear_gelu_fwd", "x", x=(0, 16)),
    of_16("fp8_linear_gelu_fwd", "w", w=(24, 16), b=(24,)),
    of_16("fp8_linear_gelu_bwd", "d", d=(24, 16), dgelu=(24, 16)),
    of_16("fp8_linear_gelu_bwd", "w", w=(24, 16), dgelu=(16, 24), db=(24,)),
    of_16("fp8_layer_weights", "w1", w1=(16, 24), b1=(24,), w2=(24, 16)),
    of_16("fp8_layer_weights", "w_o", w_o=(0, 16)),
    (
        "decode_projections",
        dict(x=ones(33, 776), g=ones(33, 40)),
        r"x: is \(33, 776\), but must have at most 32 rows",
    ),
    (
        "decode_projections",
        dict(x=ones(2, 1032), w_qkv=ones(1032, 24), w1=ones(1032, 40)) | each(NORMS, ones(1032)),
        r"x: is \(2, 1032\), .* 8 to 1024 columns",
    ),
    (
        "decode_projections",
        dict(w1=ones(776, 12), b1=ones(12), g=ones(2, 12)),
        "w1: has 12 columns, but must have a multiple of 8",
    ),
    (
        "decode_projections",
        dict(w_qkv=ones(776, 12), b_qkv=ones(12)),
        "w_qkv: has 12 columns, but must have a multiple of 8",
    ),
    ("matmul", dict(a=ones(2, 3), b=ones(1, 3, 5)), r"b: has 3 axes, must have 2: \(K, N\)"),
    ("matmul", dict(a=ones(1, 2, 3), b=ones(3, 5)), r"b: has 2 axes, must have 3: \(B, K, N\)"),
    ("rotary", dict(x=ones(1, 3, 1, 3, 4), **angles(3, 3)), "cos"),
    ("rotary", dict(parts=4), "parts"),
    ("rotary", dict(parts=-1), "parts"),
    (
        "linear_rotary_fwd",
        angles(31, 9),
        r"cos: .*9.* but a head has 16 \(give at most D / 2 angles\)",
    ),
    ("linear_rotary_fwd", dict(parts=4), "parts: .*0 .* 3"),
    ("linear_rotary_fwd", dict(parts=-1), "parts: .*0 .* 3"),
    ("attention_fwd", each("qkvo", ones(1, 2, 1, 257)), ".*256"),
    ("block_sparse_attention_fwd", dict(block=0), "block"),
    ("block_sparse_attention_fwd", dict(offsets=zeros((3, 2))), "offsets"),
    (  # two masks for three heads
        "block_sparse_attention_fwd",
        dict(each("qkvo", ones(1, 80, 3, 4)), offsets=zeros((2, 6)), order=zeros((2, 5))),
        "offsets",
    ),
    (
        "block_sparse_attention_fwd",
        dict(order=zeros((3, 4))),
        "order: names 4 blocks a mask, but there are 5",
    ),
    (
        "block_sparse_attention_bwd",
        dict(order_t=zeros((3, 6))),
        "order_t: names 6 blocks a mask, but there are 5",
    ),
    *(
        call
        for op, t, d in (("attention_bwd", 31, 16), ("block_sparse_attention_bwd", 77, 9))
        for call in (
            (op, dict(cos=None), "cos: must be given with"),
            (op, dict(sin=None), "sin: must be given with"),
            (op, angles(t, 9), "cos: 9 angles rotate 18 dims, but a head has"),
            (op, dict(db=ones(3, 2, d)), r"db: must be \(H, 3, D\), .* but has 2 parts"),
        )
    ),
    *(
        (
            "attention_bwd",
            each(["k", "v", "dk", "dv"], ones(2, keys, 3, 16)),
            f"cos: the angles of 31 positions .* but there are {keys} keys",
        )
        for keys in (30, 40)
    ),
    ("block_lists", dict(offsets=zeros((3, 31))), "offsets: axis P is 31, but 31 rows need 32"),
    ("decode_attention", dict(qkv=ones(3, 2, 2, 16)), "qkv: axis P"),
    (
        "decode_attention",
        dict(qkv=ones(3, 2, 3, 257), o=ones(3, 2, 257))
        | each(["keys", "values"], ones(3, 2, 37, 257)),
        ".*256",
    ),
    ("decode_attention", angles(37, 9), "cos"),
    ("kept_blocks", dict(block=0), "block: is 0, but must be above 0"),
    ("kept_blocks", dict(kept=ones(3, 4, 3)), "kept: axis R is 4, but 70 tokens need 5"),
    ("kept_blocks", dict(kept=ones(3, 5, 4)), "kept: axis C is 4, but 45 tokens need 3"),
    ("leaf_hashes", dict(hashes=zeros((292, 8))), r"hashes: is \(292, 8\), but 300001"),
    ("leaf_hashes", dict(hashes=zeros((293, 4))), r"hashes: is \(293, 4\), but"),
    ("random_bits", dict(state=zeros(2)), "state: axis S is 2, but .* 3 numbers"),
    ("random_tokens", dict(logits=ones(31, 0)), "logits: 0 tokens"),
    ("random_tokens", dict(temperature=0.0), "temperature: must be above 0, but is 0"),
    ("random_tokens", dict(temperature=np.nan), "temperature: must be above 0"),
    ("random_tokens", dict(state=zeros(2)), "state: axis S is 2, but .* 3 numbers"),
    ("dropout_fwd", dict(p=1.0), r"p: must be in \[0, 1\), but is 1"),
    ("dropout_fwd", dict(p=-0.5), r"p: must be in \[0, 1\), but is -0.5"),
    ("dropout_fwd", dict(p=np.nan), r"p: must be in \[0, 1\), but is -?nan"),
    ("dropout_fwd", dict(state=zeros(4)), "state: axis S is 4, but .* 3 numbers"),
    ("dropout_bwd", dict(p=1.0), r"p: must be in \[0, 1\), but is 1"),
    ("dropout_bwd", dict(drawn=zeros(0)), "drawn: axis S is 0, but .* 3 numbers"),
    ("decode_greedy", dict(logits=ones(31, 0)), "log"),
    ("decode_output_greedy", dict(w=ones(9, 0)), "decode_greedy: log"),
    ("adamw", dict(step=0), "step"),
]
# Values that the CPU looks at; CUDA, where no value can be read without waiting, gives NaN instead.
BAD_VALUES = [
    ("decode_attention", dict(positions=np.array([1, 37, 2])), "positions: row 1 is at 37"),
    ("decode_attention", dict(positions=np.array([-1, 1, 2])), "positions: row 0 is at -1"),
    (
        "decode_attention",
        dict(angles(20, 4), positions=np.array([1, 2, 20])),
        "positions: row 2 is at 20",
    ),
    *(
        ("block_sparse_attention_fwd", *call)
        for call in (
            (dict(columns=long_ids(29, 1_000_000)), ".*lists block 1000000"),
            (dict(columns=long_ids(29, 5)), ".*lists block 5 at 14"),
            (dict(order=np.tile([0, 1, 2, 3, 5], (3, 1))), "order: names block 5 at 4"),
        )
    ),
    (
        "block_sparse_attention_bwd",
        dict(order_t=np.tile([0, 1, 2, 1, 4], (3, 1))),
        "order_t: names block 1 at 3",
    ),
    ("block_lists", dict(entries=zeros(5)), r"entries: axis E is 5, but \d+ blocks are k"),
    ("block_lists", dict(entries=zeros(5000)), r"entries: axis E is 5000, but \d+ blocks are k"),
    ("embedding_fwd", dict(ids=long_ids(31, -1)), "ids: .*-1"),
    ("embedding_fwd", dict(ids=long_ids(31, 257)), "ids: .*257"),
    ("embedding_bwd", dict(ids=long_ids(31, 257)), "ids: .*257"),
    ("cross_entropy_fwd", dict(targets=long_ids(31, 257)), "targets: .*257"),
    ("cross_entropy_fwd_bwd", dict(targets=long_ids(31, 257)), "targets: .*257"),
]
