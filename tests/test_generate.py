"""Generation: with a cache as without one, rows of a batch alone, sampling, text, recording."""

import copy
import gc
import itertools
import json
import pickle
import shutil

import generate
import numpy as np
import pytest
import tokenizers
from harness import device_of, live_bytes, naming
from harness import small_pythia as model_of

import needle as ndl
from needle import _C, Tensor, generation, nn, sampling
from needle.files import printable
from needle.testing.random import philox

GREEDY = {"temperature": 0.0}
SHAPES = [
    {},
    {"use_parallel_residual": False, "hidden_act": "gelu"},
    {"rotary_pct": 0.0},
    {"rotary_pct": 1.0, "tie_word_embeddings": True},
    {"hidden_size": 40, "num_heads": 1, "vocab_size": 53},
    {"hidden_size": 512, "num_heads": 2, "num_layers": 1},
    {"attention_only": True},
]


def prompts(*lengths: int, seed=1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 41, n) for n in lengths]


def full_logits(model, ids) -> np.ndarray:
    """float32 (V,): what the model says after ids, computed from all of them."""
    return model(np.array([ids]))[0].numpy()[0, -1]


# ---- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cache_changes_nothing(shape, device, monkeypatch):
    """64 greedy tokens of two rows, and the logits after each, against the whole context computed
    again."""
    model = model_of(device, **shape)
    random = np.random.default_rng(5).standard_normal
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.cached_data[:] = _C.array(random(p.shape) / 8, p.dtype, device)
    rows = prompts(7, 19)
    heard = []

    def listening(logits, *options):
        heard.append(logits.copy())
        return sampling.sample(logits, *options)

    monkeypatch.setattr(generation, "sample", listening)
    drawn = model.generate(rows, 64, top_k=1)
    greedy = model.generate(rows, 64, **GREEDY)
    assert len(heard) == 64
    for number, row in enumerate(rows):
        assert drawn[number].tolist() == greedy[number].tolist()
        for step in range(64):
            seen = drawn[number][: len(row) + step]
            logits = full_logits(model, seen)
            scale = np.abs(logits).max()
            np.testing.assert_allclose(heard[step][number], logits, rtol=0, atol=1e-5 * scale)
            assert logits.argmax() == drawn[number][len(row) + step]


@pytest.mark.parametrize("parallel", [True, False])
def test_a_layer_in_two_places_has_a_cache_for_each(parallel, device):
    model = model_of(device, num_layers=3, use_parallel_residual=parallel)
    model.layers[2] = model.layers[0]
    row = model.generate([1, 2, 3], 9, **GREEDY)
    for end in range(3, 12):
        assert row[end] == full_logits(model, row[:end]).argmax()


@pytest.mark.parametrize("blind", [[0], [1], [0, 1]])
def test_attention_that_takes_no_cache_generates_without_one(blind, device):
    class Blind(nn.Attention):
        def forward(self, x, rotary=None, mask=None, cache=None):
            return super().forward(x, rotary, mask)

    model = model_of(device)
    for i in blind:
        model.layers[i].attention.__class__ = Blind
    rows = prompts(3, 12)
    for row, prompt in zip(model.generate(rows, 20, **GREEDY), rows, strict=True):
        for end in range(len(prompt), len(prompt) + 20):
            assert row[end] == full_logits(model, row[:end]).argmax()


def test_a_copied_model_generates_beside_a_graph_and_views(device):
    """Generation leaves the weights of a copy, or of one that was cast, where they are."""
    model = model_of(device)
    for copied in copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("bfloat16"):
        view = copied.layers[0].attention.W_O
        loss = copied.loss([[1, 2, 3]], [[2, 3, 4]])
        copied.generate([1, 2], 3, **GREEDY)
        loss.backward()
        with ndl.no_grad():
            view[0] = 0.0
        assert (copied.layers[0].attention.W_O.numpy()[0] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_different_lengths_are_as_alone_and_as_padded(dtype, device):
    model = model_of(device, seed=2, dtype=dtype)
    rows = prompts(1, 17, 4, 30, 17)
    together = model.generate(rows, 40, **GREEDY)
    assert isinstance(together, list)
    if dtype == "float32":
        apart = copy.deepcopy(model)  # its last weights will be no neighbours in memory
        for layer in apart.layers:
            layer.attention.dense.weight.requires_grad = False
        nn.flatten_parameters(apart)
        for one, other in zip(together, apart.generate(rows, 40, **GREEDY), strict=True):
            np.testing.assert_array_equal(one, other)
    for row, got in zip(rows, together):
        assert got.dtype == np.int64 and got[: len(row)].tolist() == row.tolist()
        if dtype == "float32":  # elsewhere a product of five rows may round unlike that of one
            np.testing.assert_array_equal(model.generate(row, 40, **GREEDY), got)
        assert got.shape == (len(row) + 40,)


SPARSE = {"use_sparse_attention": True, "sparse_pattern": "local", "sparse_window": 8}


@pytest.mark.parametrize("changes, most", [({"max_seq_len": 16}, 16),
                                           (SPARSE | {"sparse_block": 4}, 99)])  # fmt: skip
def test_each_token_is_the_likeliest_of_the_context(changes, most, device):
    """The last part of a context beyond max_seq_len is read, row by row."""
    model = model_of(device, **changes)
    for row, got in zip(rows := prompts(5, 12, 30), model.generate(rows, 20, **GREEDY)):
        for end in range(len(row), len(got)):
            assert full_logits(model, got[max(0, end - most) : end]).argmax() == got[end]


# ---- choosing ------------------------------------------------------------------------------------


def penalized_by_hand(logits, seen, penalty):
    logits = logits.astype(np.float64)
    for token in set(seen):
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    return logits


@pytest.mark.parametrize("options", [GREEDY, {"seed": 3}, {"seed": 3, "top_k": 9}])
def test_fewer_tokens_are_the_beginning_of_more(options, device):
    """Whatever the device does ahead, and with tokens that come after the caller has enough."""
    model, rows = model_of(device), prompts(3, 2)
    most = np.stack(list(model.stream(rows, 11, **options)))
    for count in range(11):
        few = list(model.stream(rows, count, **options))
        assert len(few) == count
        np.testing.assert_array_equal(np.array(few).reshape(-1, 2), most[:count])
        begun = model.stream(rows, 11, **options)
        drawn = [next(begun) for _ in range(count)]
        begun.close()
        np.testing.assert_array_equal(np.array(drawn).reshape(-1, 2), most[:count])


@pytest.mark.parametrize("penalty", [1.3, 3.0, 0.7])
def test_repetition_penalty(penalty, device):
    model = model_of(device, seed=5)
    rows = prompts(4, 8)
    plain = model.generate(rows, 20, **GREEDY)
    out = model.generate(rows, 20, **GREEDY, repetition_penalty=penalty)
    assert any((a != b).any() for a, b in zip(plain, out))
    for row, got in zip(rows, out):
        for end in range(len(row), len(got)):
            logits = penalized_by_hand(full_logits(model, got[:end]), got[:end].tolist(), penalty)
            assert logits.argmax() == got[end]
    logits, seen = np.array([[2.0, -2.0, 0.0, 1.0, -1.0]]), np.array([[1, 1, 1, 0, 0]], bool)
    wanted = [[2 / penalty, -2 * penalty, 0, 1, -1]]  # lower, or higher, of either sign
    np.testing.assert_allclose(sampling.penalized(logits, seen, penalty), wanted)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_temperature_draws_by_philox_with_and_without_the_cache(device, temperature):
    """One number of NumPy is the key; row b of step n has block 2 n + b of the words."""
    model, rows = model_of(device, seed=5), prompts(4, 8)
    found = model.generate(rows, 20, temperature, seed=3)
    with model.hooks({"hook_embed": lambda x: None}):
        slow = model.generate(rows, 20, temperature, seed=3)
    limited = {"temperature": 1.5, "top_k": 9, "top_p": 0.9}
    for options in ({"temperature": temperature}, limited):
        one, same, other = (
            np.concatenate(model.generate(rows, 20, seed=seed, **options))
            for seed in (0, 0, 2**32 - 1)
        )
        assert (one == same).all() and (one != other).any()
    key = np.random.RandomState(3).randint(-(2**63), 2**63, dtype=np.int64)
    words = philox((key, 0, 0), 4 * 2 * 20).reshape(20, 2, 4).astype(np.float64)
    for (b, got), step in itertools.product([*enumerate(found), *enumerate(slow)], range(20)):
        at = len(rows[b]) + step
        logits = full_logits(model, got[:at]).astype(np.float64)
        upto = np.cumsum(np.exp((logits - logits.max()) / temperature))
        u = (words[step, b, 0] // 32 * 2**26 + words[step, b, 1] // 64) / 2**53
        below = upto[got[at] - 1] if got[at] else 0
        assert below - 1e-4 * upto[-1] <= u * upto[-1] <= upto[got[at]] + 1e-4 * upto[-1]


class Fixed:
    """Uniform numbers in order."""

    def __init__(self):
        self.next = (i + 0.5 for i in range(1000))

    def random_sample(self):
        return next(self.next) / 1000


def test_sample_draws_from_the_right_distribution():
    """Tokens and their frequencies against the definition; a vocabulary beyond the part
    that top_p looks at first."""
    logits = np.random.default_rng(0).standard_normal(1300).astype(np.float32) * 0.01
    logits[[3, 70, 1200]] = 6.0, 5.5, 5.0
    order = np.argsort(-logits, kind="stable")
    for temperature, top_k, top_p in itertools.product(
        (0.5, 1.0, 2.0), (None, 1, 7, 3000), (None, 0.3, 0.9, 1.0)
    ):
        kept = order[:top_k]
        p = np.exp(logits[kept].astype(np.float64) / temperature)
        p /= p.sum()
        if top_p is not None:
            count = np.searchsorted(np.cumsum(p), top_p * (1 - 1e-12)) + 1
            kept, p = kept[:count], p[:count] / p[:count].sum()
        limits, fixed = (temperature, top_k, top_p), Fixed()
        drawn = sampling.sample(np.broadcast_to(logits, (1000, 1300)), *limits, fixed)
        assert set(drawn) <= set(kept.tolist()), limits
        for token in (3, 70, 1200):
            expected = p[kept == token].sum()
            assert abs((drawn == token).mean() - expected) < 1e-3, limits


class Largest:
    """The largest number that a generator draws."""

    def random_sample(self):
        return 1 - 2.0**-53


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sample_takes_masked_tokens_as_absent(dtype):
    """A row with -inf against the same row without those tokens, with equal numbers drawn."""
    logits = np.random.default_rng(0).standard_normal((40, 30)).astype(dtype)
    allowed = np.array([1, 4, 5, 17, 28])
    masked = np.full_like(logits, -np.inf)
    masked[:, allowed] = logits[:, allowed]
    for limits in (
        (0,), (0.5,), (1, 3), (1, 20), (1, None, 0.7), (1, None, 1.0), (2, 4, 0.9), (1e-308, 20),
    ):  # fmt: skip
        for random in (Fixed, Largest):
            with naming(limits, random):
                limits = (*limits, None, None)[:3]
                got = sampling.sample(masked, *limits, random())
                wanted = allowed[sampling.sample(logits[:, allowed], *limits, random())]
                np.testing.assert_array_equal(got, wanted)
    for limits in ((5e-324,), (1e-308, 2), (1e-8, None, 0.5)):  # the likeliest
        np.testing.assert_array_equal(sampling.sample(logits, *limits), logits.argmax(1))
    equals = np.array([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])  # of equal ones the first are kept
    assert sampling.sample(equals, 1, 3, None, Largest()) == [2]
    assert sampling.sample(equals, 1, 3, None, Fixed()) == [1]
    for bad in (np.nan, np.inf):
        masked[3, 0] = bad
        with pytest.raises(ValueError, match="not finite: NaN or inf"):
            sampling.sample(masked)
    masked[3] = -np.inf
    with pytest.raises(ValueError, match="-inf for every token"):
        sampling.sample(masked, 0)


# ---- stopping ------------------------------------------------------------------------------------


def test_text_is_continued_as_text(device):
    model = model_of(device, vocab_size=280)
    tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat "] * 9), 280)
    model.tokenizer, texts = tokenizer, ["the cat", "mat"]
    rows = [tokenizer.encode(text).ids for text in texts]
    whole = [model.generate(row, 6, **GREEDY).tolist() for row in rows]
    wanted = [tokenizer.decode(row, False) for row in whole]
    assert model.generate(texts, 6, **GREEDY) == wanted
    assert model.generate(texts[1], 6, **GREEDY) == wanted[1]
    end = whole[0].index(whole[0][len(rows[0]) + 1], len(rows[0]))  # where it first comes
    stopped = model.generate(texts[:1], 6, stop=[whole[0][end]], **GREEDY)
    assert stopped == [tokenizer.decode(whole[0][: end + 1], False)]
    assert len(list(model.stream(texts, 3, **GREEDY))) == 3
    model.tokenizer = ndl.data.load_tokenizer(tokenizer, tokenizer.id_to_token(whole[0][end]))
    assert model.generate(texts[:1], 6, **GREEDY) == stopped  # at its end of a text ...
    assert model.generate(texts[:1], 6, stop=[], **GREEDY) == wanted[:1]  # ... or at none
    assert len(model.generate(rows[0])) == len(rows[0]) + 20


def test_stop_tokens(device):
    model, rows = model_of(device), prompts(6, 6)
    plain = model.generate(np.stack(rows), 30, **GREEDY)
    stop = int(plain[0, 12])
    first = int(np.flatnonzero(plain[0, 6:] == stop)[0]) + 6
    out = model.generate(np.stack(rows), 30, **GREEDY, stop=[stop])
    np.testing.assert_array_equal(out[0, : first + 1], plain[0, : first + 1])
    assert (out[0, first:] == stop).all()
    absent = max(set(range(model.config.vocab_size)) - set(plain.ravel().tolist()))
    for given in ({stop}, np.array([stop]), [absent, stop]):
        ragged = model.generate([rows[0], rows[1][:4]], 30, **GREEDY, stop=given)
        assert len(ragged[0]) == first + 1
        assert ragged[1][-1] == stop or len(ragged[1]) == 34


def test_text_ends_where_the_files_or_the_flag_say(tmp_path, capsys):
    """In Python and by the command; after ids it goes on. The ends are tokens that are drawn."""
    model = model_of(vocab_size=280)
    made = ndl.data.train_tokenizer(iter(["the cat sat on the mat "] * 9), 280)
    ids = made.encode("the cat").ids
    drawn = model.generate(ids, 20, **GREEDY)[len(ids) :].tolist()
    assert len({*drawn[:9]}) == 9
    model.save_pretrained(tmp_path / "a", made)
    for file, said, flag, length in (
        ("tokenizer_config", {}, None, 20),
        ("tokenizer_config", {"eos_token": made.id_to_token(drawn[7])}, None, 7),
        ("generation_config", {"eos_token_id": drawn[6]}, None, 6),
        ("generation_config", {"eos_token_id": [drawn[8], drawn[3]]}, None, 3),
        ("config", {"eos_token_id": drawn[2]}, None, 2),
        ("config", {"eos_token_id": drawn[2]}, made.id_to_token(drawn[8]), 8),
    ):
        folder = tmp_path / str(length)
        shutil.copytree(tmp_path / "a", folder)
        path = folder / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | said))
        read = ndl.Pythia.from_pretrained(folder)
        if flag is not None:
            read.tokenizer = ndl.data.load_tokenizer(folder, flag)
        wanted = made.decode(drawn[:length])
        with naming(file, said, flag):
            assert read.generate(ids, 20, **GREEDY)[len(ids) :].tolist() == drawn
            whole = made.decode(ids + drawn[: length + 1], False)
            assert read.generate("the cat", 20, **GREEDY) == whole
            assert len([*read.stream(["the cat"], 20, **GREEDY)]) == min(length + 1, 20)
            given = read, read.tokenizer, ["the cat"], 20
            assert generation.generate_text(*given, **GREEDY) == [wanted]
            words = "--prompt", "the cat", *"--max-new-tokens 20 --temperature 0".split()
            words += () if flag is None else ("--end-of-text", flag)
            assert generate.main([str(folder), *words, "--device", "cpu"]) == 0
            assert capsys.readouterr().out == printable(f"the cat{wanted}\n")


def test_model_of_the_command_has_the_dtype_and_the_device_of_its_flags(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(generate, "load_model", lambda *words: given.append(words) or (None, None))
    assert generate.main("a --device cpu --dtype bfloat16".split()) == 1
    assert given == [("a", ndl.cpu(), "bfloat16")]
    assert "a: no tokenizer.json lies with it; give --tokenizer" in capsys.readouterr().err


def test_flags_of_the_command_are_those_of_generate(tmp_path, capsys):
    """Each of them changes the text."""
    model = model_of(vocab_size=280)
    tokenizer = ndl.data.train_tokenizer(iter(["the cat sat on the mat "] * 9), 280)
    model.save_pretrained(tmp_path / "a", tokenizer)
    plain, seen = {"temperature": 1.0, "seed": 1}, []
    for name, value in (
        ("seed", 1),
        ("seed", 0),
        ("temperature", 0.1),
        ("top_k", 2),
        ("top_p", 0.1),
        ("repetition_penalty", 9.0),
    ):
        options = {**plain, name: value}
        words = [f"--{key.replace('_', '-')}={number}" for key, number in options.items()]
        words += ["--prompt", "the cat", "--max-new-tokens", "20", "--device", "cpu"]
        with naming(name, value):
            assert generate.main([str(tmp_path / "a"), *words]) == 0
            seen.append(capsys.readouterr().out)
            [text] = generation.generate_text(model, tokenizer, ["the cat"], 20, **options)
            assert seen[-1] == printable(f"the cat{text}\n")
    assert len({*seen}) == len(seen)
    [text] = generation.generate_text(model, tokenizer, ["the cat"], 20, **plain)
    ends = text[2:5], text[-3:]  # the command stops at the first of them
    words = [word for end in ends for word in (f"--stop={end}", "--temperature=1", "--seed=1")]
    words += ["--prompt", "the cat", "--max-new-tokens", "20", "--device", "cpu"]
    assert generate.main([str(tmp_path / "a"), *words]) == 0
    [stopped] = generation.generate_text(
        model, tokenizer, ["the cat"], 20, stop_strings=ends, **plain
    )
    assert capsys.readouterr().out == printable(f"the cat{stopped}\n") and len(stopped) < 5


class Letters(ndl.data.Tokenizer):
    """A tokenizer whose token 1 + i is the letter i, token 0 half of the character é."""

    stops = ()

    def __init__(self):
        pass

    def get_vocab_size(self):
        return 27

    def encode(self, text, add_special_tokens):
        return type("Encoding", (), {"ids": [1 + ord(c) - ord("a") for c in text]})

    def decode(self, ids):
        text = "".join("\x00" if i == 0 else chr(ord("a") + i - 1) for i in ids)
        return text.replace("\x00\x00", "é").replace("\x00", "\ufffd")


class Says:
    """A model's stream that has been written down."""

    def __init__(self, *rows: str) -> None:
        self.rows = [[0 if c == "_" else 1 + ord(c) - ord("a") for c in row] for row in rows]

    def __call__(self, model, ids, count, stop=(), **options):
        for step in range(min(count, len(self.rows[0]))):
            yield np.array([row[step] for row in self.rows], np.int32)


@pytest.mark.parametrize(
    "says, stops, end, chunks, text",
    [
        ("hello", (), 26, ["h", "e", "l", "l", "o"], "hello"),
        ("hello", ("l",), 26, ["h", "e"], "he"),
        ("hello", ("lo",), 26, ["h", "e", "l", "l"], "hel"),  # its beginning has been yielded
        ("hello", ("lx",), 26, ["h", "e", "l", "l", "o"], "hello"),
        ("hello", ("ell", "l"), 26, ["h", "e"], "he"),
        ("hello", ("lo", "llo"), 26, ["h", "e", "l", "l"], "he"),  # both at once: the earlier
        ("a__b", (), 26, ["a", "é", "b"], "aéb"),
        ("a_", (), 26, ["a", "\ufffd"], "a\ufffd"),
        ("abzcd", (), 26, ["a", "b"], "ab"),
        ("hello", ("h",), 26, [], ""),
        ("ab_c", (), 0, ["a", "b"], "ab"),  # token 0 ends a text
    ],
)
def test_stop_strings(says, stops, end, chunks, text, monkeypatch):
    monkeypatch.setattr(generation, "stream", Says(says))
    got = list(generation.stream_text(None, Letters(), "x", 9, stop_strings=stops, end=end))
    assert [chunk for chunk in got if chunk] == chunks
    whole = generation.generate_text(None, Letters(), ["x"], 9, stop_strings=stops, end=end)
    assert whole == [text]


@pytest.mark.parametrize("prompt", ["the cat", "", "the caf\xe9"])
def test_text_has_the_space_that_its_tokenizer_drops_at_a_beginning(monkeypatch, prompt):
    """As that of Llama, and one whose tokens are words."""
    corpus, pre, decoders = ["the cat sat "] * 9, tokenizers.pre_tokenizers, tokenizers.decoders
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    pieces.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    strip = decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), *strip])
    names = ["<end>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=names)
    pieces.train_from_iterator(corpus, trainer)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    words.pre_tokenizer = pre.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<end>", "?"])
    words.train_from_iterator(corpus, trainer)
    for made in pieces, words:
        tokenizer = ndl.data.load_tokenizer(made, "<end>")
        drawn = [[i] for i in tokenizer.encode("sat the cat").ids]
        monkeypatch.setattr(generation, "stream", lambda *args, d=drawn, **more: iter(d))
        text = " sat the cat"[not prompt :]
        assert "".join(generation.stream_text(None, tokenizer, prompt, 9)) == text
        assert generation.generate_text(None, tokenizer, [prompt], 9) == [text]


def test_texts_in_a_batch():
    model = model_of(vocab_size=27)
    options = {"temperature": 0.0, "stop_strings": ("b", "fo"), "end": 26}
    several = ["abc", "zebra", "q"]
    together = generation.generate_text(model, Letters(), several, 30, **options)
    for prompt, text in zip(several, together, strict=True):
        chunks = generation.stream_text(model, Letters(), prompt, 30, **options)
        assert "".join(chunks).startswith(text)
        assert "b" not in text and "fo" not in text
    for texts, stops, error, said in (
        ([b"a\xff".decode("utf-8", "surrogateescape")], (), ValueError, "surrogates not allowed"),
        (["a"], ("",), ValueError, "stop_strings"),
        (["a"], "ab", ValueError, "stop_strings"),
        (["a", ""], (), ValueError, "one at least"),
        ("abc", (), TypeError, "prompts must be a list"),
    ):
        with naming(texts, stops), pytest.raises(error, match=said):
            generation.generate_text(model, Letters(), texts, 3, stop_strings=stops)
    assert len(generation.generate_text(model, Letters(), [""], 3, end=26)) == 1


# ---- refusals, and what is left ------------------------------------------------------------------


def test_refusals():
    counts = "max_new_tokens must be a whole number of 0 or more, not"
    stops = "stop must be a list of token ids"
    for ids, options, error, message in [
        ([], {}, ValueError, "no prompt"),
        ([[1, 2], []], {}, ValueError, "row 1: must be token ids, one at least"),
        (np.zeros((2, 0), int), {}, ValueError, "row 0: must be token ids, one at least"),
        ([[1], [2, 41]], {}, ValueError, r"row 1: token 41 at position \(1,\)"),
        ([[1, -1]], {}, ValueError, r"row 0: token -1 at position \(1,\)"),
        ([[[1]]], {}, ValueError, "must be token ids"),
        *(
            ([1], {name: value}, ValueError, name)
            for name, values in (
                ("repetition_penalty", (0.0, float("nan"), None)),
                ("temperature", (-1.0, float("nan"), None)),
                ("top_k", (0, 2.5)),
                ("top_p", (0.0, 1.5)),
                ("seed", (-1, 1 << 32, 2.5)),
            )
            for value in (*values, "1", [1])
        ),
        *(([1], {"max_new_tokens": n}, ValueError, f"{counts} {n}") for n in (2.5, -1, None)),
        ("abc", {}, ValueError, "Pythia has no tokenizer, so it takes ids"),
        ([1], {"stop": "a"}, TypeError, stops),
        ([1], {"stop": 3}, TypeError, stops),
        ([1], {"stop": ["a"]}, TypeError, stops),
        (3, {}, TypeError, "input_ids must be token ids.*not int"),
        ({"input_ids": [[1]]}, {}, TypeError, "input_ids must be token ids.*not dict"),
        (None, {}, TypeError, "input_ids must be token ids.*not NoneType"),
    ]:
        with naming(ids, options), pytest.raises(error, match=message):
            model_of().generate(ids, **{"max_new_tokens": 2} | options)


class Masked(nn.Linear):
    """A head that masks tokens by -inf: all but `allowed`."""

    def allow(self, *tokens: int) -> None:
        mask = np.full(self.out_features, -np.inf)
        mask[list(tokens)] = 0
        self.mask = Tensor(mask, device=self.weight.device, requires_grad=False)

    def forward(self, x, *, residual=None):
        return super().forward(x) + self.mask


@pytest.mark.parametrize("options", [GREEDY, {"seed": 1}, {"seed": 1, "top_k": 9, "top_p": 0.9}])
@pytest.mark.parametrize("hooked", [False, True])
def test_masked_logits_are_never_drawn(hooked, options, device):
    model = model_of(device)
    weight = model.embed_out.weight
    model.embed_out = Masked(32, 41, bias=False, device=device)
    model.embed_out.weight = weight
    allowed = (2, 3, 40)
    model.embed_out.allow(*allowed)
    with model.hooks({"hook_embed": lambda x: x} if hooked else {}):
        assert model.is_hooked == hooked
        drawn = model.generate(prompts(6, 6), 20, **options)[:, 6:]
        if options == GREEDY:
            likeliest = [full_logits(model, row).argmax() for row in prompts(6, 6)]
            np.testing.assert_array_equal(drawn[:, 0], likeliest)
        assert set(drawn.ravel()) <= set(allowed) and drawn.dtype == np.int64
        model.embed_out.allow()
        with pytest.raises(ValueError, match="-inf for every token"):
            model.generate([1, 2, 3], 3, **options)


@pytest.mark.parametrize("options", [GREEDY, {"seed": 1}])
def test_generation_frees_its_memory(device, options):
    model = model_of(device)
    model.generate([1, 2, 3], 9, **options)
    before = live_bytes(model.device)
    gc.disable()
    try:
        model.generate(prompts(4, 9), 20, **options)
        tokens = model.stream([1, 2], 50, **options)
        for _ in range(10):
            next(tokens)
        tokens.close()  # in the middle
        assert model.device.memory_stats()["live_bytes"] == before
    finally:
        gc.enable()


# ---- recorded steps ------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    """The GPU; afterwards all memory is back."""
    device = device_of("cuda")
    before = live_bytes(device)
    yield device
    assert live_bytes(device) == before


@pytest.mark.cuda
def test_graph(gpu):
    x = _C.array(np.arange(1000.0), device=gpu)

    def step():
        y = x * 2.0
        x[:] = y + y.sum() * 0.0 + 1.0

    graph = _C.Graph(gpu, step)
    expected = np.arange(1000.0)
    np.testing.assert_array_equal(x.numpy(), expected)  # recording computes nothing
    for _ in range(5):
        graph.replay()
        gpu.empty_cache()
        expected = expected * 2 + 1
    np.testing.assert_array_equal(x.numpy(), expected)


@pytest.mark.cuda
def test_graph_refuses(gpu):
    x = _C.array(np.ones(5), device=gpu)
    buffer = _C.PinnedBuffer(20, gpu)

    def raises():
        x + x  # noqa: B018
        raise KeyError("mine")

    for step, exception, message in [
        (raises, KeyError, "mine"),
        (lambda: x.numpy(), ValueError, "download: a graph"),
        (lambda: _C.AsyncCopy(x), ValueError, "async_copy: a graph"),
        (lambda: _C.array(np.ones(5), device=gpu), ValueError, "upload: a graph"),
        (lambda: buffer.send((5,), "float32"), ValueError, "pinned_buffer: a graph"),
        (gpu.synchronize, ValueError, "synchronize: a graph"),
        (lambda: _C.Graph(gpu, raises), ValueError, "already"),
    ]:
        with pytest.raises(exception, match=message):
            _C.Graph(gpu, step)
        np.testing.assert_array_equal((x + 1.0).numpy(), 2)  # all is as before


@pytest.mark.cuda
def test_graph_array_that_is_kept_holds_the_latest_replay(gpu):
    """And one that the step lets go stays what it was."""
    x, given = (_C.array(np.full(1 << 20, one), device=gpu) for one in (1.0, 3.0))
    given, kept = [given], []

    def step():
        kept.append(x + 1.0)
        kept.append(kept[0].sum())  # takes scratch
        x[:] = kept[0] * 2.0 + given.pop()

    graph = _C.Graph(gpu, step)
    for wanted in 2.0, 8.0, 20.0:
        gpu.empty_cache()
        junk = [_C.array(np.full(1 << 20, np.nan), device=gpu) for _ in range(3)]
        graph.replay()
        np.testing.assert_array_equal(kept[0].numpy(), np.full(1 << 20, wanted))
        assert kept[1].item() == wanted * (1 << 20)
    del graph, junk
    np.testing.assert_array_equal((kept[0] + x).numpy(), 20.0 + 43.0)
    kept.clear()
