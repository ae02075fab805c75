"""The order of samples: GPT-NeoX's, and positions in it."""

import hashlib

import numpy as np
import pytest
from harness import naming
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import RANDOM, documents_of, write_megatron

import needle as ndl
from needle.data import Batches, DataError, megatron, open_data, sample_order


@pytest.mark.parametrize(
    "seq_len, seed, samples, passes, digests",
    [
        (16, 1234, 700, 3, ["f5353d4e31b4ba90", "5ca4c6ff56fec52d", "ffd9dfa54ac1f0d5"]),
        (5, 0, 900, 1, ["672d581510429fc2", "f60923e41e339c6e", "5c1ff92cd2b6795d"]),
    ],
)
def test_the_index_arrays_of_gpt_neox(seq_len, seed, samples, passes, digests):
    """The digests are of what GPT-NeoX's own functions return for these sizes."""
    sizes = (np.arange(97) * 37 % 101 + 1).astype(np.int32)
    assert megatron.passes_for(samples, int(sizes.sum()), seq_len) == passes
    arrays = sample_order(sizes, 0, 97, seq_len, seed, passes)
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.uint32]
    assert [hashlib.blake2b(a.tobytes(), digest_size=8).hexdigest() for a in arrays] == digests


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_samples_walk_the_shuffled_documents(sizes, seq_len, seed, passes):
    """Against a walk of one id after the other."""
    sizes = np.array(sizes, np.int32)
    if sizes.sum() * passes < seq_len + 1:
        return
    doc_idx, sample_idx, shuffle_idx = sample_order(sizes, 0, len(sizes), seq_len, seed, passes)
    assert np.array_equal(np.bincount(doc_idx, minlength=len(sizes)), np.full(len(sizes), passes))
    walk = [(place, i) for place, document in enumerate(doc_idx) for i in range(sizes[document])]
    expected = [(0, 0), *walk[seq_len::seq_len]]
    np.testing.assert_array_equal(sample_idx, expected)
    assert sorted(shuffle_idx) == list(range(len(sample_idx) - 1))
    # Of documents between others.
    more, last = np.concatenate([[7, 0], sizes, [3]]).astype(np.int32), 2 + len(sizes)
    others = sample_order(more, 2, last, seq_len, seed, passes)
    for got, wanted in zip(others, (doc_idx + 2, sample_idx, shuffle_idx)):
        np.testing.assert_array_equal(got, wanted)


def test_passes_are_the_fewest_that_hold_the_samples():
    """The last sample needs one id after it."""
    for samples, tokens, passes in [(1, 4, 2), (1, 5, 1), (2, 9, 1), (2, 8, 2), (9, 4, 10)]:
        assert megatron.passes_for(samples, tokens, 4) == passes


def test_ids_have_the_type_that_gpt_neox_chooses():
    assert [megatron.best_dtype(size) for size in (65_499, 65_500)] == ["<u2", "<i4"]


def test_packed_batches_hold_the_samples_of_the_index(tmp_path):
    documents = documents_of(RANDOM.randint(1, 50, 40))
    write_megatron(tmp_path / "x", documents)
    data = open_data(tmp_path / "x")
    batches = Batches(data.train, 3, 16, seed=7, samples=150)
    sizes = np.array([len(d) for d in documents[:39]], np.int32)
    passes = megatron.passes_for(150, int(sizes.sum()), 16)
    assert passes > 1 and batches.position == {"epoch": 0, "batch": 0, "passes": passes}
    seen = []
    for epoch in range(3):  # each further epoch is the order of the next seed
        doc_idx, _, shuffle_idx = sample_order(sizes, 0, 39, 16, 7 + epoch, passes)
        flat = np.concatenate([documents[i] for i in doc_idx])
        drawn = np.concatenate([batches.next_rows() for _ in range(len(batches))])
        for sample, row in zip(shuffle_idx, drawn):
            np.testing.assert_array_equal(row, flat[16 * sample : 16 * sample + 17])
        seen.append(drawn)
        assert batches.position == {"epoch": epoch, "batch": len(batches), "passes": passes}
    position = {"epoch": 0, "batch": 4, "passes": passes}
    shorter = Batches(data.train, 3, 16, seed=7)  # another number of steps
    shorter.seek(position)
    np.testing.assert_array_equal(shorter.next_rows(), seen[0][12:15])
    shorter.seek_batch(len(shorter) + 2)
    assert shorter.position == {"epoch": 1, "batch": 2, "passes": passes}
    for name in position:
        for wrong in position | {name: -1}, {**position, name: 0} | {"batch": len(shorter) + 1}, {}:
            with pytest.raises(DataError, match="no position"):
                shorter.seek(wrong)
            assert shorter.position == {"epoch": 1, "batch": 2, "passes": passes}


def test_sizes_and_tokens_that_are_none_are_refused_at_once():
    for sizes in ((0, 4), (2, 0), (2.0, 4)):
        with pytest.raises(ValueError, match="Batches: .* must be 1 or more, a whole number, but"):
            Batches(np.arange(99), *sizes)
    ids = np.arange(99)
    for tokens, kind, says in (
        (ids.astype(np.float32), TypeError, r"integers of one axis \(N,\), but are float32"),
        ("tokens.npy", TypeError, r"integers of one axis \(N,\), but are <U10 of shape \(\)"),
        (ids.reshape(9, 11), TypeError, r"one axis \(N,\), but are int64 of shape \(9, 11\)"),
    ):
        with naming(says), pytest.raises(kind, match=says):
            Batches(tokens, 2, 4)
    wanted = Batches(ids, 2, 4).next()
    for tokens in ids.tolist(), ndl.Tensor(ids, dtype="int32"):
        np.testing.assert_array_equal(Batches(tokens, 2, 4).next(), wanted)
