"""A tokenizer that truncates, pads and ends its texts with another token than Pythia's, in every
place that takes one, against the package `tokenizers` itself."""

import copy
import json
from types import SimpleNamespace

import pytest
from harness import naming, small_pythia
from token_files import json_lines

import needle as ndl
from needle.data import DataError, __main__, load_tokenizer, open_data, open_documents

tokenizers = pytest.importorskip("tokenizers")
LONG = "the cat sat on the mat, the dog on the log"
TEXTS = [LONG, "the cat", "on the mat, on the log"]


def trained(*special):
    """A byte-level tokenizer that cuts texts to 5 tokens and fills them up to 9."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([LONG] * 3, trainer)
    made.enable_truncation(5)
    made.enable_padding(length=9)
    return made


def ids_of(made, text):
    """The ids of a text, of the package alone, neither cut nor filled up."""
    plain = tokenizers.Tokenizer.from_str(made.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain.encode(text).ids


def write(folder, made, **files):
    """tokenizer.json, and files named tokenizer_config ... beside it; the path of the first."""
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    for name, fields in files.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder / "tokenizer.json"


# ---- special tokens ------------------------------------------------------------------------------

UNKNOWN = ("<a>", "<b>", "<c>")  # ids 0, 1, 2
BY_TOKEN = {"eos_token": {"content": "<b>", "lstrip": False}, "bos_token": "<a>", "pad_token": None}
BY_ID = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2}
TWO_ENDS, NO_END = {"eos_token_id": [2, 1]}, {"eos_token": None}


@pytest.mark.parametrize(
    "special, files, stops, bos, pad",
    [
        (["<|endoftext|>", "<|padding|>"], {}, (0,), 0, 1),
        (["<s>", "</s>", "<pad>"], {}, (1,), 0, 2),
        (["[UNK]", "[EOS]", "[PAD]"], {}, (1,), 1, 2),
        (["</s>", "<|endoftext|>"], {"tokenizer_config": {"eos_token": "</s>"}}, (0,), None, None),
        (UNKNOWN, {}, (), None, None),
        (UNKNOWN, {"tokenizer_config": BY_TOKEN}, (1,), 0, None),
        (UNKNOWN, {"special_tokens_map": {"eos_token": "<c>"}}, (2,), 2, None),
        (UNKNOWN, {"config": BY_ID}, (1,), 0, 2),
        (UNKNOWN, {"config": {"eos_token_id": True}}, (), None, None),
        (UNKNOWN, {"generation_config": TWO_ENDS, "config": BY_ID}, (2, 1), 0, 2),
        (UNKNOWN, {"generation_config": TWO_ENDS, "tokenizer_config": BY_TOKEN}, (1, 2), 0, None),
        (["</s>", *UNKNOWN], {"tokenizer_config": NO_END, "config": TWO_ENDS}, (2, 1), None, None),
        (["</s>"], {"config": {"eos_token_id": 9999, "pad_token_id": -1}}, (0,), 0, None),
        (["</s>"], {"tokenizer_config": {"eos_token": "<none>"}}, (0,), None, None),
    ],
)  # fmt: skip
def test_special_tokens_are_those_of_the_first_file_that_names_them(
    tmp_path, special, files, stops, bos, pad
):
    path = write(tmp_path / "a", trained(*special), **files)
    for given in path, str(path.parent), copy.deepcopy(load_tokenizer(path)):
        found = load_tokenizer(given)
        assert (found.stops, found.bos_token_id, found.pad_token_id) == (stops, bos, pad)
        assert found.eos_token_id == (stops[0] if stops else None)
    said = load_tokenizer(path, special[-1])  # by the flag, over all files
    assert said.stops[0] == len(special) - 1 and len(said.stops) == 1
    assert f"end of text {special[-1]!r}, id {len(special) - 1}" in repr(said)
    assert said.files.keys() == found.files.keys() | {"config.json"}
    with pytest.raises(DataError, match="--end-of-text <none>: .* has no such token"):
        load_tokenizer(path, "<none>")


def test_ordinary_token_called_like_an_end_is_none(tmp_path):
    words = {"a": 0, "</s>": 1, "<pad>": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    assert load_tokenizer(made).stops == () and load_tokenizer(made).pad_token_id is None
    assert "no end of text: --end-of-text names one" in repr(load_tokenizer(made))
    assert load_tokenizer(made, "</s>").stops == (1,)


def test_damaged_files_beside_a_tokenizer_are_named(tmp_path):
    path = write(tmp_path / "a", trained("</s>"), config=[1])  # no file of a model: left alone
    assert load_tokenizer(path).stops == (0,)
    for content in (b"{", b"[]", b"\xff"):
        (path.parent / "tokenizer_config.json").write_bytes(content)
        with naming(content), pytest.raises(DataError, match="/tokenizer_config.json: "):
            load_tokenizer(path)


def test_what_is_no_tokenizer_is_refused_at_once(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    slow = SimpleNamespace(save_pretrained=lambda folder: None)  # as ByT5's, without a file of it
    for given, error, said in (
        (slow, DataError, "the tokenizer: holds no tokenizer: give a tokenizer.json"),
        (3, TypeError, "the path of a tokenizer.json, not 3"),
        (tmp_path / "none", DataError, "none: no such tokenizer file; give a tokenizer.json"),
        (tmp_path, DataError, "tokenizer.json: not a tokenizer.json: "),
    ):
        with naming(given), pytest.raises(error, match=said):
            load_tokenizer(given)


# ---- truncation and padding ----------------------------------------------------------------------


@pytest.fixture
def ways(tmp_path):
    """A tokenizer, and how it is given: as a path, a folder, itself, in a checkpoint."""
    made, model = trained("<s>", "</s>"), small_pythia(vocab_size=300)
    path = write(tmp_path / "a", made, tokenizer_config={"eos_token": "</s>"})
    model.tokenizer = path
    checkpoint = ndl.save_checkpoint(model, None, 0, 1.0, tmp_path / "b.safetensors")
    return made, (path, str(path), path.parent, made, load_tokenizer(path), checkpoint)


def test_tokenizer_neither_cuts_nor_pads_however_it_is_taken(tmp_path, ways, monkeypatch):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    made, given = ways
    model, greedy = small_pythia(vocab_size=300), {"temperature": 0.0}
    wanted = [ids_of(made, text) for text in TEXTS]
    assert len(wanted[0]) > 9 > 5 > len(wanted[1])
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    documents = [token for ids in wanted for token in (*ids, 1)]
    for number, way in enumerate(given):
        with naming(way):
            assert [load_tokenizer(way).encode(text).ids for text in TEXTS] == wanted
            data = open_data(tmp_path / "a.jsonl", way)
            assert [*data.train.tolist(), *data.held_out.tolist()] == documents
            model.tokenizer = way
            for ids, row in zip(wanted, model.to_tokens(TEXTS)):
                assert row.tolist() == ids + [1] * (len(wanted[0]) - len(ids))
            assert model.to_tokens("the cat", prepend_bos=True).tolist()[0][1:] == wanted[1]
            plain = [model.generate(ids, 6, **greedy)[len(ids) :].tolist() for ids in wanted]
            texts = ndl.generation.generate_text(model, way, TEXTS, 6, end=-1, **greedy)
            assert texts == [load_tokenizer(way).decode(ids) for ids in plain]
            out = tmp_path / f"out{number}"
            if way is not made and not isinstance(way, ndl.data.Tokenizer):
                words = ["--tokenizer", str(way), "--out", str(out)]
                assert __main__.main(["prepare", str(tmp_path / "a.jsonl"), *words]) == 0
                assert open_documents(out).tolist() == documents
    assert made.truncation["max_length"] == 5 and made.padding["length"] == 9  # as it was given


# ---- the end of a document -----------------------------------------------------------------------


def test_documents_end_with_the_token_that_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    made = trained(*UNKNOWN)
    path = write(tmp_path / "a", made, tokenizer_config={"eos_token": "<c>"})
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    for tokenizer, words, end in (
        (made, None, None),  # the tokens of another end are in the cache then
        (load_tokenizer(path), [], 2),
        (load_tokenizer(path, "<b>"), ["--end-of-text", "<b>"], 1),
    ):
        tail = [] if end is None else [end]
        wanted = [token for text in TEXTS for token in (*ids_of(made, text), *tail)]
        data = open_data(tmp_path / "a.jsonl", tokenizer)
        assert [*data.train.tolist(), *data.held_out.tolist()] == wanted
        if words is not None:
            out = tmp_path / f"x{end}"
            words = ["--tokenizer", str(path), "--out", str(out), *words]
            assert __main__.main(["prepare", str(tmp_path / "a.jsonl"), *words]) == 0
            assert open_documents(out).tolist() == wanted
            assert f"end of text {UNKNOWN[end]!r}, id {end}" in capsys.readouterr().out


def test_texts_of_several_lengths_without_an_end_say_how_to_name_one():
    model = small_pythia(vocab_size=300)
    model.tokenizer = trained(*UNKNOWN)
    assert model.to_tokens(TEXTS[:1]).shape[0] == 1  # nothing to fill up
    for text, more in (TEXTS, {}), (LONG, {"prepend_bos": True}):
        with pytest.raises(ValueError, match="no end of text: .*load_tokenizer.path, end_of_text"):
            model.to_tokens(text, **more)
    model.tokenizer = load_tokenizer(model.tokenizer, "<c>")
    assert model.to_tokens(TEXTS)[1, -1] == 2 == model.to_tokens(LONG, prepend_bos=True)[0, 0]
    model.tokenizer = trained("<s>", "</s>", "<pad>")
    assert model.to_tokens(TEXTS, prepend_bos=True)[1, [0, -1]].tolist() == [0, 2]
