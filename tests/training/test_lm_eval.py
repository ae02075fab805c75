"""needle in the LM evaluation harness: each kind of request, and whole tasks over local files,
against the harness' own `hf` model on the exported checkpoint."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from harness import DEVICES, run, small_pythia

import needle as ndl
from needle import data

pytestmark = [
    pytest.mark.parity,
    # Of the harness and its dependencies; needle's own would still be errors elsewhere.
    pytest.mark.filterwarnings("ignore::Warning"),
]
CONTEXT = 48
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "In winter the lake freezes, and people skate.",
    "A café by the sea: naïve, quiet, and dear.",
    "def f(x):\n    return x + 1\n",
    "Numbers such as 3.1415 and 2.7182 never end.",
    "日本語の文字 and ünïcödé mixed together.",
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """step_1.safetensors, and exported/ for transformers."""
    pytest.importorskip("lm_eval", reason="lm_eval not installed (pip install .[parity])")
    pytest.importorskip(
        "accelerate",
        reason="accelerate not installed, which `hf` of lm_eval needs (pip install .[parity])",
    )
    top = tmp_path_factory.mktemp("lm_eval")
    tokenizer = data.train_tokenizer(iter(SENTENCES * 4), 350)
    tokenizer.enable_truncation(4)  # as a call of transformers leaves it
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(top / "tokenizer.json"))
    sizes = dict(vocab_size=384, hidden_size=64, num_heads=4, max_seq_len=CONTEXT)
    model = small_pythia(seed=11, **sizes)
    for parameter in model.parameters():  # far from the start, so that answers differ
        noise = 0.15 * np.random.standard_normal(parameter.shape)
        parameter.data = ndl.Tensor(parameter.numpy() + noise)
    ndl.save_checkpoint(model, None, 0, 1.0, top / "step_1.safetensors")
    model.save_pretrained(top / "exported", top / "tokenizer.json")
    return top


def loaded(name, path, **options):
    """A model of the harness; on the CPU, where no device is given."""
    from lm_eval.api.registry import get_model

    import needle.training.lm_eval  # noqa: F401  registers it

    return get_model(name)(pretrained=str(path), **{"device": "cpu", "batch_size": 4} | options)


@pytest.fixture(scope="session", params=DEVICES)
def models(folder, request):
    """(needle, hf on the CPU) on the same weights."""
    ours = loaded("needle", folder / "step_1.safetensors", device=request.param)
    return ours, loaded("hf", folder / "exported", dtype="float32")


def requests(*arguments) -> list:
    return [SimpleNamespace(args=args, task_name="test") for args in arguments]


def test_loglikelihood(models):
    ours, theirs = models
    assert ours.max_length == theirs.max_length == CONTEXT
    assert ours.eot_token_id == theirs.eot_token_id
    assert ours.prefix_token_id == theirs.prefix_token_id
    for text in [*SENTENCES, "", " ", "<|endoftext|>after", "a<|endoftext|>b"]:
        assert ours.tok_encode(text) == list(theirs.tok_encode(text)), text
    pairs = [(a, " " + b) for a in SENTENCES for b in SENTENCES[:3]]
    pairs += [("", b) for b in SENTENCES]  # no context: BOS
    pairs += [("", "<|endoftext|>begins with it")]
    pairs += [("ends in blanks  ", "and goes on"), ("x", "y"), ("x", "yz"), ("x", " e")]
    pairs += [(" ".join(SENTENCES), " truncated on the left")]  # beyond the context
    pairs += [("<|endoftext|>The", " quick"), ("The quick", " brown")]
    ours, theirs = (m.loglikelihood(requests(*pairs), disable_tqdm=True) for m in models)
    # One that greedy decoding writes, so that both answers of is_greedy are seen.
    text = models[0].generate_until(requests(("The quick", {"max_gen_toks": 4})), True)[0]
    more = [m.loglikelihood(requests(("The quick", text)), disable_tqdm=True) for m in models]
    ours, theirs = ours + more[0], theirs + more[1]
    assert len(models[0].tok_encode(" ".join(SENTENCES))) > CONTEXT
    for a, b in zip(ours, theirs):
        assert abs(a[0] - b[0]) < 1e-4 * max(1, abs(b[0]) ** 0.5)
        assert a[1] == b[1]
    assert {a[1] for a in ours} == {True, False}


def test_loglikelihood_rolling(models):
    texts = [(t,) for t in [*SENTENCES, " ".join(SENTENCES), " ".join(SENTENCES * 3), "x", ""]]
    ours, theirs = (m.loglikelihood_rolling(requests(*texts), disable_tqdm=True) for m in models)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    assert ours[-1] == 0


def test_generate_until(models):
    options = [
        {"until": ["e", "\n"], "max_gen_toks": 10},
        {"until": ".", "max_gen_toks": 24, "do_sample": False},
        {"max_gen_toks": 5, "temperature": 0.0},
    ]
    prompts = [*SENTENCES, " ".join(SENTENCES)]
    asked = [(prompt, option) for prompt in prompts for option in options]
    ours = models[0].generate_until(requests(*asked), disable_tqdm=True)
    theirs = models[1].generate_until(requests(*asked), disable_tqdm=True)
    assert ours == theirs
    assert len(set(ours)) > 8
    repeated = models[0].generate_until(requests(*asked[::-1]), disable_tqdm=True)
    assert repeated[::-1] == ours


@pytest.mark.parametrize("begins", [True, False])
def test_add_bos_token_is_that_of_the_harness(folder, begins):
    exported = folder / "exported"
    models = [loaded(name, exported, add_bos_token=begins) for name in ("needle", "hf")]
    for text in [*SENTENCES, "", "<|endoftext|>begins with it"]:
        ours, theirs = (list(model.tok_encode(text)) for model in models)
        assert ours == theirs and (ours[:1] == [0]) == (begins or text.startswith("<")), text
    pairs = requests(*[(a, " " + b) for a in SENTENCES for b in SENTENCES[:2]], ("", "x"))
    ours, theirs = (model.loglikelihood(pairs, disable_tqdm=True) for model in models)
    np.testing.assert_allclose([a[0] for a in ours], [b[0] for b in theirs], rtol=1e-4)
    texts = requests(*[(text,) for text in [*SENTENCES, " ".join(SENTENCES)]])
    ours, theirs = (model.loglikelihood_rolling(texts, disable_tqdm=True) for model in models)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_sampling_follows_the_seed(models):
    options = {"temperature": 1.0, "do_sample": True, "top_k": 20, "max_gen_toks": 8}
    asked = requests(*[(sentence, options) for sentence in SENTENCES])
    drawn = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        drawn.append(models[0].generate_until(asked, disable_tqdm=True))
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_cannot_be_answered_is_refused(models, folder, tmp_path):
    ours = models[0]
    for function, words, said in (
        (ours.generate_until, ("x", {"num_beams": 4}), "num_beams"),
        (ours.generate_until, ("x", {"max_gen_toks": CONTEXT}), "no room"),
        (ours.loglikelihood, ("x", " ".join(SENTENCES)), "continuation"),
    ):
        with pytest.raises(ValueError, match=said):
            function(requests(words), disable_tqdm=True)
    alone = tmp_path / "deep" / "alone.safetensors"
    alone.parent.mkdir()
    shutil.copy(folder / "step_1.safetensors", alone)
    with pytest.raises(ValueError, match="tokenizer=PATH"):
        type(ours)(str(alone), device="cpu")
    model = type(ours)(str(alone), tokenizer=str(folder), device="cpu", batch_size="auto")
    assert model.batch_size == 16384 // CONTEXT


def test_special_tokens_are_those_of_the_files_or_of_the_flag(folder, tmp_path):
    """Prefix and end of text are those of `hf` on the same folder."""
    place = tmp_path / "a"
    shutil.copytree(folder / "exported", place)
    text = (folder / "tokenizer.json").read_text()
    made = tokenizers.Tokenizer.from_str(text.replace("<|endoftext|>", "</s>"))
    made.add_special_tokens(["<s>"])
    made.save(str(place / "tokenizer.json"))
    (place / "special_tokens_map.json").unlink()
    file = place / "tokenizer_config.json"
    words = json.loads(file.read_text())
    for bos, begin in (None, 0), ("<s>", made.token_to_id("<s>")):
        file.write_text(json.dumps(words | {"eos_token": "</s>", "bos_token": bos}))
        ours, theirs = (loaded(name, place, dtype="float32") for name in ("needle", "hf"))
        assert ours.eot_token_id == theirs.eot_token_id == 0
        assert ours.prefix_token_id == theirs.prefix_token_id == begin
        pairs = [("", "The quick"), ("The quick", " brown fox")]
        for a, b in zip(*(m.loglikelihood(requests(*pairs), True) for m in (ours, theirs))):
            assert a[0] == pytest.approx(b[0], abs=1e-3)
    (tmp_path / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<end>"))
    words = "needle", folder / "step_1.safetensors"
    with pytest.raises(ValueError, match="no end of text: .*give end_of_text=TOKEN in --model_a"):
        loaded(*words, tokenizer=str(tmp_path))
    ours = loaded(*words, tokenizer=str(tmp_path), end_of_text="<end>")
    assert ours.eot_token_id == ours.prefix_token_id == 0


# ---- the command ---------------------------------------------------------------------------------

TASK = """task: needle_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/texts.jsonl
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


def test_command_registers_the_model_and_runs_a_task(folder, tmp_path):
    """Its numbers are those of `hf`; `import needle.training.lm_eval` is enough for the harness."""
    lines = [json.dumps({"text": " ".join(SENTENCES[: i + 1])}) + "\n" for i in range(6)]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    (tmp_path / "task.yaml").write_text(TASK.format(folder=tmp_path))
    models = {
        "hf": f"pretrained={folder}/exported,dtype=float32",
        "needle": f"pretrained={folder}/step_1.safetensors",
    }
    code = f"""
import json, sys, lm_eval, needle.training.lm_eval
from lm_eval.api.registry import MODEL_REGISTRY, get_model
from lm_eval.tasks import TaskManager
assert get_model("needle") is needle.training.lm_eval.NeedleLM
assert get_model("dummy").__name__ == "DummyLM"
tasks = TaskManager(include_path={str(tmp_path)!r}, include_defaults=False)
for model, given in {models!r}.items():
    found = lm_eval.simple_evaluate(
        model, given, tasks=["needle_text"], task_manager=tasks, device="cpu"
    )
    print("found:" + json.dumps(found["results"]["needle_text"]))
from needle.command import main
sys.argv = ["needle", "lm_eval", "--model", "needle", "--tasks", "needle_text",
            "--include_path", {str(tmp_path)!r}, "--model_args", "pretrained=none"]
code = main(None)
sys.argv = ["needle", "lm_eval", "--help"]
print(code, flush=True)
main(None)
"""
    offline = {"HF_HUB_OFFLINE": 1, "HF_DATASETS_OFFLINE": 1, "HF_HOME": tmp_path / "cache"}
    done = run(sys.executable, "-c", code, PYTHONWARNINGS="ignore", **offline)
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line[:6] == "found:"]
    assert len(found) == 2, done.stderr[-2000:]
    for name in "word_perplexity,none", "bits_per_byte,none":
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)
    assert found[1]["word_perplexity,none"] > 1
    assert "\n1\n" in done.stdout and "needle lm_eval: none: no such file or folder" in done.stderr
    assert "--model needle" in done.stdout and "pretrained: " in done.stdout
    assert "hellaswag" in done.stdout  # the harness' own help follows
