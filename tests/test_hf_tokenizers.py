"""Tokenizers and special tokens in folders of transformers, in and out, without transformers."""

import json

import pytest
from test_hf import (
    BASE,
    WITHOUT_TOKENIZER,
    assert_same_files,
    bpe,
    model_of,
    names_in,
    theirs,
    write,
)

import needle as ndl
from needle.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from needle.models.pythia import Pythia
from needle.training import export as shell


def test_the_tokenizer_comes_along(tmp_path):
    tokenizer = bpe()
    model = model_of(vocab_size=300)
    model.save_pretrained(tmp_path / "a", tokenizer)
    read = ndl.data.load_tokenizer(tmp_path / "a")
    assert read.to_str() == tokenizer.to_str()
    settings = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["eos_token"] == "<|endoftext|>" and settings["pad_token"] == "<|padding|>"
    assert settings["model_max_length"] == 24
    special = json.loads((tmp_path / "a" / "special_tokens_map.json").read_text())
    assert special == {name: settings[name] for name in settings if name.endswith("_token")}


def test_a_model_brings_the_tokenizer_that_it_came_with(tmp_path):
    run = tmp_path / "run"
    save_checkpoint(model_of(vocab_size=300), None, 0, 1.0, run / "checkpoints/step_1.safetensors")
    (run / "tokenizer.json").write_text(bpe().to_str())
    model = load_checkpoint(run / "checkpoints" / "step_1.safetensors")[0]
    model.save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    model = Pythia.from_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert_same_files(tmp_path / "a", tmp_path / "b")
    model.tokenizer = None
    model.save_pretrained(tmp_path / "c")
    assert names_in(tmp_path / "c") == WITHOUT_TOKENIZER
    more = tuple(f"<{i}>" for i in range(99))
    (run / "tokenizer.json").write_text(bpe(more, vocab_size=400).to_str())
    model = load_checkpoint(run / "checkpoints" / "step_1.safetensors")[0]
    hint = r".*\(this tokenizer came with the model: model.tokenizer = None leaves it out\)"
    with pytest.raises(ValueError, match="do not belong together" + hint):
        model.save_pretrained(tmp_path / "d")
    (run / "tokenizer.json").write_text("{}")
    model = load_checkpoint(run / "checkpoints" / "step_1.safetensors")[0]
    with pytest.raises(CheckpointError, match="not a tokenizer.json: .*" + hint):
        model.save_pretrained(tmp_path / "d")
    (run / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: no such tokenizer file"):
        model.save_pretrained(tmp_path / "d", run / "tokenizer.json")
    with pytest.raises(ValueError, match="has token 27., but the model's vocabulary is 37"):
        model_of().save_pretrained(tmp_path / "d", bpe())
    assert not (tmp_path / "d").exists()


SPECIAL = {
    "config.json": {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None},
    "generation_config.json": {"eos_token_id": 2, "pad_token_id": 3, "temperature": 0.7},
}
BESIDE = {
    "tokenizer_config.json": {"eos_token": "</s>", "bos_token": "<s>", "extra": [1]},
    "special_tokens_map.json": {"eos_token": {"content": "</s>"}},
}


@pytest.mark.parametrize("with_tokenizer", [True, False])
@pytest.mark.parametrize("left_out", [(), ("config.json",), ("generation_config.json",)])
def test_import_then_export_gives_back_what_came(tmp_path, with_tokenizer, left_out):
    """Ids, a list of them, tokens and other settings, with and without a tokenizer."""
    came = {name: fields for name, fields in SPECIAL.items() if name not in left_out}
    folder = write(tmp_path / "a", theirs(model_of(vocab_size=300)), **BASE | {"vocab_size": 300},
                   **came.get("config.json", {}))  # fmt: skip
    came.pop("config.json", None)
    if with_tokenizer:
        came |= BESIDE
        made = bpe(("<unk>", "<s>", "</s>", "<pad>"))
        made.enable_truncation(3)
        made.save(str(folder / "tokenizer.json"))
    for name, fields in came.items():
        (folder / name).write_text(json.dumps(fields))
    checkpoint, back = tmp_path / "model.safetensors", tmp_path / "back"
    assert shell.main(["import", str(folder), str(checkpoint)]) == 0
    folder.rename(tmp_path / "gone")
    assert shell.main(["export", str(checkpoint), str(back)]) == 0
    for name in (*came, *["tokenizer.json"] * with_tokenizer):
        assert (back / name).read_bytes() == (tmp_path / "gone" / name).read_bytes()
    fields = json.loads((back / "config.json").read_text())
    ids = SPECIAL["config.json"]
    if "config.json" in left_out:  # the other files say it
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
        ids = ids if with_tokenizer else dict.fromkeys(ids)
    assert {name: fields[name] for name in ids} == ids
    if "generation_config.json" in left_out:
        generation = json.loads((back / "generation_config.json").read_text())
        assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    model = Pythia.from_pretrained(checkpoint)
    assert (model.tokenizer is not None) == with_tokenizer
    if with_tokenizer:
        assert model.tokenizer.stops == ((2, 3) if "config.json" not in left_out else (2,))


def test_export_names_the_end_of_text_that_was_said(tmp_path):
    """By the flag, over what came: in each file, so that transformers stops there."""
    folder = write(tmp_path / "a", theirs(model_of(vocab_size=300)), **BASE | {"vocab_size": 300})
    bpe(("<unk>", "<s>", "</s>", "<end>")).save(str(folder / "tokenizer.json"))
    for name, fields in {**SPECIAL, **BESIDE}.items():
        if name != "config.json":
            (folder / name).write_text(json.dumps(fields))
    model = Pythia.from_pretrained(folder)
    model.tokenizer = ndl.data.load_tokenizer(folder, end_of_text="<end>")
    save_checkpoint(model, None, 0, 1.0, tmp_path / "b.safetensors")
    load_checkpoint(tmp_path / "b.safetensors")[0].save_pretrained(tmp_path / "c")
    read = {path.name: json.loads(path.read_text()) for path in (tmp_path / "c").glob("*.json")}
    assert [read[name]["eos_token_id"] for name in SPECIAL] == [3, 3]
    assert read["tokenizer_config.json"] == BESIDE["tokenizer_config.json"] | {"eos_token": "<end>"}
    assert read["special_tokens_map.json"]["eos_token"] == "<end>"
    assert read["generation_config.json"]["temperature"] == 0.7
