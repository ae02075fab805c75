"""Structured ops at sizes past each blocking constant of the CPU backend, with a remainder."""

import itertools
from functools import partial

import numpy as np
import pytest
from harness import check_numbers, naming, poison

from needle.testing import call, prepare
from needle.testing.attention import (
    attention_bwd,
    attention_fwd,
    attention_inputs,
    attention_part_bwd,
    attention_part_fwd,
    backward_terms,
    block_sparse_attention_bwd,
    block_sparse_attention_fwd,
    forward_terms,
    irregular,
    part_inputs,
    rotated_sparse_inputs,
    sparse_inputs,
)
from needle.testing.case import cases_of, targets
from needle.testing.layers import (
    adamw,
    bias_bwd,
    bias_inputs,
    cross_entropy_fwd,
    cross_entropy_fwd_bwd,
    embedding_bwd,
    embedding_grad_inputs,
    first_size,
    grad_norm,
    larger_size,
    linear_fwd,
    linear_gelu_bwd,
    linear_gelu_fwd,
    linear_gelu_grad_inputs,
    linear_gelu_inputs,
    linear_inputs,
    losses_inputs,
    norm_inputs,
    optimizer_inputs,
    second_size,
)

ATTENTION = {  # label: B, T, S, H, D, causal
    "two-groups-of-heads": (1, 8, 4096, 20, 64, 1),  # 32 MiB of keys and values each
    "groups-across-batches": (2, 8, 4096, 9, 64, 0),
    "many-short-heads": (5, 70, 40, 33, 16, 1),  # several a thread
    "several-tiles": (2, 197, 389, 3, 24, 1),
}
BLOCKS = irregular(3, 5, 10)
SPARSE = {"several-tiles": (2, 320, 640, 3, 24, 0, BLOCKS, 64, None)}
BACKWARD = {**ATTENTION, "two-groups-of-heads": (1, 8, 700, 20, 64, 1)}
BACKWARD.pop("groups-across-batches")


def masked_losses(n, v, first, last):
    """Logits of -inf in columns [first, last): of whole blocks, the first one among them."""

    def inputs(rng):
        made = {"logits": rng.standard_normal((n, v)) * 3, "targets": targets(n, v)(rng)}
        made["logits"][:, first:last] = -np.inf
        seen = np.delete(np.arange(v), np.s_[first:last])
        made["targets"] = seen[made["targets"] % len(seen)]
        return made

    return inputs


MASKED = {
    "first-block-masked": (5, 9001, 0, 4096),
    "all-but-the-last-masked": (5, 9001, 0, 9000),
    "middle-block-masked": (5, 12_300, 4096, 8192),
    "last-block-masked": (5, 9001, 8192, 9001),
}
LONG = {"ignored": (40, 9001, (0, 7, 39))}
# Rows, inner size, columns, form: past the CPU's blocks; more tiles than a GPU's multiprocessors.
MLPS = [(530, 40, 2100, 1), (17_032, 72, 40, 1), (24, 72, 17_032, 1), (17_032, 520, 24, 0)]


LARGE = [
    *cases_of(attention_fwd, attention_inputs, ATTENTION, forward_terms),
    *cases_of(
        attention_bwd,
        partial(attention_inputs, backward=True, db=True),
        BACKWARD,
        backward_terms,
        of_rounded=("db",),
    ),
    *cases_of(
        block_sparse_attention_fwd, lambda *shape: sparse_inputs(*shape[:-1]), SPARSE, forward_terms
    ),
    *cases_of(
        block_sparse_attention_bwd,
        rotated_sparse_inputs,
        SPARSE,
        backward_terms,
        of_rounded=("db",),
    ),
    *cases_of(cross_entropy_fwd, masked_losses, MASKED, second_size),
    *cases_of(cross_entropy_fwd_bwd, masked_losses, MASKED, second_size),
    *cases_of(cross_entropy_fwd, losses_inputs, LONG, second_size),
    *cases_of(cross_entropy_fwd_bwd, losses_inputs, LONG, second_size),
    *cases_of(linear_fwd, linear_inputs, [(530, 1050, 1100, 1, 1)], second_size),
    *cases_of(linear_gelu_fwd, linear_gelu_inputs, MLPS, second_size),
    *cases_of(linear_gelu_bwd, linear_gelu_grad_inputs, MLPS, larger_size, of_rounded=("db",)),
    *cases_of(bias_bwd, bias_inputs, [(530, 2100, 1)], first_size),
    *cases_of(embedding_bwd, embedding_grad_inputs, [(2000, 31, 300)], lambda n, v, c: n / v),
    *cases_of(
        attention_part_fwd,
        part_inputs,
        {"several-tiles": (2, 197, 389, 3, 24, 1, 1)},
        forward_terms,
    ),
    *cases_of(
        attention_part_bwd,
        partial(part_inputs, backward=True),
        {"several-tiles": (2, 197, 389, 3, 24, 1, 1)},
        backward_terms,
    ),
    *cases_of(grad_norm, norm_inputs, [(200_003, 1.0)], first_size),
    *cases_of(adamw, optimizer_inputs, {"scaled": (200_003, True, 0.25)}),
]


@pytest.mark.parametrize("op", dict.fromkeys(case.op for case in LARGE))
def test_structured_past_each_block_size(op, device):
    for case, dtype in itertools.product(LARGE, ("float32", "bfloat16")):
        if case.op == op:
            with naming(case, dtype):
                values = prepare(case, dtype)
                poison(device)
                check_numbers(case, values, call(case, values, dtype, device), dtype)
