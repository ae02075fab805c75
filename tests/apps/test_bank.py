"""needle replay --edits: a bank of replays; needle compare --edits: their effects on a probe. A
suite: models trained, their cards, and a page by which a stranger checks an interval."""

import hashlib
import json
import os
import re
import shlex
import shutil
import threading
import time

import numpy as np
import pytest
import train_pythia
from harness import ROOT, naming
from small_runs import CPU, EVERY, Killed, arguments, contents, flags, retell, run_until

import needle as ndl
from needle.data import open_run_data
from needle.training.folder import again
from needle.training.replay import bank, compare, replays, suite, verify
from needle.training.replay.compare import losses, spearman
from needle.training.replay.replays import Replay

DROP = "[[edit]]\ndo = 'drop'\nwhere = {{ document = {} }}\n"
FILES = {
    "a.toml": DROP.format(1),
    "b.toml": "[[edit]]\ndo = 'drop'\nwhere = { ids = 'some.txt' }\n",
    "c.toml": "[[edit]]\ndo = 'replace'\nwhere = { document = 7 }\nwith_ids = [1, 2, 3]\n",
}


@pytest.fixture
def edits(tmp_path):
    (tmp_path / "edits").mkdir()
    for name, text in FILES.items():
        (tmp_path / "edits" / name).write_text(text)
    (tmp_path / "edits" / "some.txt").write_text("3\n4\n5\n8\n")
    return tmp_path / "edits"


@pytest.fixture
def parent(tmp_path, documents, here, request):
    """A run of 6 steps on 9 documents of 10 tokens, with the flags of a parameter."""
    data, _ = documents("data", [10] * 9)
    more = getattr(request, "param", "")
    assert train_pythia.main(flags(tmp_path, data, "run", EVERY, more)) == 0
    return ndl.open_run(tmp_path / "runs" / "run")


def made(parent, edits, name, *more, start=2):
    words = [parent.folder, "--from", start, "--edits", edits, "--name", name, *CPU, *more]
    return bank.main([str(word) for word in words])


def files_of(folder):
    """path -> bytes of the results in a bank."""
    return contents(folder / "retrained") | {"subsets": (folder / "subsets.json").read_bytes()}


def test_bank_has_the_models_of_single_replays(tmp_path, parent, edits):
    assert made(parent, edits, "bank") == 0
    folder = tmp_path / "runs" / "bank"
    subsets = json.loads((folder / "subsets.json").read_text())
    assert subsets == [[1], [3, 4, 5, 8], [7]]
    names = ["base", "subset_0", "subset_1", "subset_2"]
    assert sorted(path.name for path in (folder / "retrained").iterdir()) == names
    singles = [parent, *(parent.replay(2, edits / name, flags=CPU) for name in FILES)]
    weights = []
    for name, single in zip(names, singles):
        model = ndl.models.from_pretrained(folder / "retrained" / name)
        weights.append({n: p.numpy() for n, p in model.named_parameters()})
        wanted = dict(single.model(6).named_parameters())
        assert all((weights[-1][n] == p.numpy()).all() for n, p in wanted.items())
        assert (weights[-1]["embed_in.weight"] != weights[0]["embed_in.weight"]).any() == (
            name != "base"
        )
        told = ndl.open_run(folder / "runs" / name)
        assert len(told.metrics["loss"]) == 6 and (told.folder / "replay.json").exists()
    assert [path.parent.name for path in folder.glob("runs/*/checkpoints")] == ["base"]
    # Another bank, in two parts, from a step without a checkpoint of the run, is made twice.
    for name in "odd", "even":
        assert made(parent, edits, name, "--part", "2/2", start=3) == 0
        assert not (tmp_path / "runs" / name / "retrained" / "subset_0").exists()
        assert made(parent, edits, name, "--part", "1/2", start=3) == 0
    odd, even = (files_of(tmp_path / "runs" / name) for name in ("odd", "even"))
    assert odd == even and len(odd) == 1 + 4 * 3
    fork = tmp_path / "runs" / "odd" / "runs" / "subset_0" / "replay.json"
    assert json.loads(fork.read_text())["base"] == 3  # the checkpoint that the base left
    base = "base/model.safetensors"
    assert odd[base] == files_of(folder)[base]


def test_bank_that_was_killed_goes_on(tmp_path, parent, edits, monkeypatch):
    assert made(parent, edits, "whole", start=0) == 0
    folder, trained = tmp_path / "runs" / "killed", []
    train = replays.train

    def killed(place, *rest):
        trained.append(place.name)
        if len(trained) == 3:
            run_until(monkeypatch, 5, [*again(place), *CPU])
            raise KeyboardInterrupt
        return train(place, *rest)

    monkeypatch.setattr(replays, "train", killed)
    assert made(parent, edits, "killed", start=0) == 130
    assert trained == ["base", "subset_0", "subset_1"]
    shutil.copytree(folder / "runs" / "subset_0", folder / "runs" / ".subset_2")  # not whole yet
    assert made(parent, edits, "killed", start=0) == 0
    assert trained[3:] == ["subset_1", "subset_2"]
    assert files_of(folder) == files_of(tmp_path / "runs" / "whole")
    assert made(parent, edits, "killed", start=0) == 0 and len(trained) == 5


def test_bank_refuses_what_it_is_not_for(tmp_path, parent, edits, monkeypatch, refused, capsys):
    for more, place in ([], "runs"), (["--out", tmp_path / "others"], "others"):
        assert made(parent, edits, "bank", "--dry-run", *more) == 0
        said = f"{tmp_path / place / 'bank'}: 3 replays from step 2 to 6\n"
        assert said in capsys.readouterr().out
        assert not (tmp_path / place / "bank").exists()
    with monkeypatch.context() as patch:
        patch.chdir(parent.folder)  # whose name a bank has
        assert bank.main([".", "--from", "2", "--edits", str(edits), "--dry-run"]) == 0
        assert f"{parent.folder}-bank: 3 replays" in capsys.readouterr().out
    assert made(parent, edits, "bank") == 0

    def refuses(says, name, *more, folder=edits, code=1):
        words = parent.folder, "--from", 2, "--edits", folder, "--name", name, *CPU, *more
        refused(bank.main, words, says, code)

    (edits / "d.toml").write_text("[[edit]]\ndo = 'drop'\nwhere = { document = 99 }\n")
    (tmp_path / "empty").mkdir()
    refuses("bank: a bank of another run, other steps or other edits", "bank")
    refuses("d.toml: edit 1 (drop): document 99 is not there", "new")
    refuses("there is no file of edits (*.toml) in it", "new", folder=tmp_path / "empty")
    refuses("run: there is a run of this name already", "run")
    assert not (tmp_path / "runs" / "new").exists()
    config = parent.folder / "config.json"
    written = config.read_text()
    config.write_text(written.replace('"dtype"', '"attention_only": true, "dtype"'))
    refuses("has no MLPs", "new")
    config.write_text(written)
    wrong = [["--part", text] for text in ("0/2", "3/2", "1", "x")]
    for more in *wrong, ["--resume", "auto"], ["--edit", edits / "a.toml"], ["--launch", "mpirun"]:
        refuses(more[0], "new", *more, code=2)
    words = parent.folder, "--from", 2, "--part", "1/2", "--jobs", 2
    refused(bank.main, words, "--part, --jobs: needs --edits", 2)
    (edits / "d.toml").unlink()
    (edits / "a.toml").write_text(DROP.format(2))
    refuses("or other edits", "bank")
    (edits / "a.toml").write_text(FILES["a.toml"])
    refuses("other steps", "bank", "--steps", 3)
    retell(parent.folder, 5, loss=9.0)
    refuses("without edits, a replay differs from", "new")
    assert made(parent, edits, "new", "--no-control") == 0
    lock = ndl.files.Lock(tmp_path / "runs" / "bank" / "runs" / ".part-1-of-1")
    refuses("is working in this folder", "bank")
    lock.release()


def test_bank_ends_soon_after_a_replay_that_failed(parent, edits, monkeypatch):
    """With --jobs the replays that run are ended, and no others begin."""
    for number in range(30):
        (edits / f"d{number:02}.toml").write_text(DROP.format(1))
    begun, rightly = [], bank._train

    def fails(folder, name, *more):
        if name == "base":
            return rightly(folder, name, *more)
        begun.append(name)
        time.sleep(0.05)
        if name == "subset_0":
            raise RuntimeError("it failed")

    monkeypatch.setattr(bank, "_train", fails)
    assert made(parent, edits, "bank", "--jobs", "2", "--no-control") == 1
    assert "subset_1" in begun and len(begun) < 10


@pytest.mark.parametrize("device, wanted", [([], {"cuda:0", "cuda:1"}), (CPU, {"cpu"})])
def test_jobs_of_a_bank_take_the_gpus_in_turn_and_share_the_cores(
    parent, edits, monkeypatch, device, wanted
):
    told, both = {}, threading.Barrier(3)

    def train(folder, name, replay, flags):
        if name != "base":
            both.wait(10)  # three at a time
            told[name] = flags[-1]

    monkeypatch.setattr(bank, "_train", train)
    monkeypatch.setattr(bank, "visible_gpus", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    words = ["--from", "0", "--edits", str(edits), "--jobs", "3", "--no-control", *device]
    assert bank.main([str(parent.folder), *words]) == 0
    assert len(told) == 3 and {*told.values()} == wanted
    assert os.environ["OMP_NUM_THREADS"] == str(max(len(os.sched_getaffinity(0)) // 3, 1))


def gradient(model, loss, inputs, targets):
    """The gradient of a loss, by name."""
    for p in model.parameters():
        p.grad = None
    loss(inputs, targets).backward()
    return {name: p.grad.numpy().astype(np.float64) for name, p in model.named_parameters()}


@pytest.mark.parametrize("parent", ["--grad-accum 2"], indirect=True)
def test_effects_are_measured_and_predicted(tmp_path, parent, edits, documents, refused, capsys):
    assert made(parent, edits, "bank") == 0
    folder = tmp_path / "runs" / "bank"
    probe, texts = documents("probe", [20, 1, 5], seed=6)
    capsys.readouterr()
    figure = tmp_path / "effects.svg"
    words = "--edits", folder, "--probe", probe, "--plot", figure
    assert compare.main([*map(str, words), *CPU]) == 0
    assert len(re.findall(r'<use [^>]*x="', figure.read_text())) >= 3 * 3
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [row for row in rows if row["kind"] == "effect"]
    assert [row["difference"] for row in found] == sorted(
        (row["difference"] for row in found), reverse=True
    )
    assert {(r["edits"], r["document"]) for r in found} == {
        (name, document) for name in FILES for document in (0, 2, "all")
    }
    effects = {(row["edits"], row["document"]): row for row in found}
    models = [parent.model(6), *(parent.replay(2, edits / f, flags=CPU).model(6) for f in FILES)]
    for name, model in zip(FILES, models[1:]):
        pair = [losses(m, texts, models[0])[2, 1] / 4 for m in (model, models[0])]
        row = effects[name, 2]
        assert row["difference"] == pytest.approx(pair[0] - pair[1], abs=1e-6)
    # The loss along the gradients that the edits take away, at small rates.
    data, batches, settings = open_run_data(parent.folder)
    batches.seek(parent.checkpoint(2).state["data"])
    model = parent.model(2)
    rates = parent.metrics["lr"]
    known = json.loads((folder / "bank.json").read_text())
    last = texts[0][None, 4:20].astype(int)  # whose last three follow the first window of 16
    last[:, :13] = -1
    long, short = (texts[i][None].astype(int) for i in (0, 2))
    windows = (long[:, :16], long[:, 1:17]), (long[:, 3:19], last), (short[:, :-1], short[:, 1:])
    of = [gradient(model, model.loss, *window) for window in windows]
    of_texts = {2: of[2], 0: {n: of[0][n] * 16 / 19 + of[1][n] * 3 / 19 for n in of[0]}}
    of_texts["all"] = {n: (of_texts[0][n] * 19 + of[2][n] * 4) / 23 for n in of[0]}
    for number, name in enumerate(FILES):
        change, edited = Replay("", None, 2, 2, 6, known["edits"][number]), batches.copy()
        change.begin(data, edited, 2)
        plain, loss, own = batches.copy(), change.loss(model.loss), dict.fromkeys(of_texts, 0.0)
        for step in np.repeat(range(3, 7), 2):
            a = gradient(model, model.loss, *plain.next())
            b = gradient(model, loss, *edited.next())
            for text, c in of_texts.items():
                own[text] += rates[step - 1] * sum(((a[n] - b[n]) * c[n]).sum() for n in a) / 2
        for text in of_texts:
            with naming(name, text):
                wanted = pytest.approx(own[text], rel=1e-3, abs=1e-9)
                assert effects[name, text]["predicted"] == wanted
    for row in rows[len(found) :]:
        own = [effects[name, row["document"]] for name in FILES]
        pair = ([one[key] for one in own] for key in ("difference", "predicted"))
        assert row["spearman"] == pytest.approx(spearman(*pair))
        assert row["kind"] == "correlation" and row["edits"] == 3
    assert [row["document"] for row in rows[len(found) :]].count("all") == 1
    assert spearman([1, 1], [1, 2]) is None
    probe, _ = documents("short", [1, 1], seed=6)
    words = "--edits", folder, "--probe", probe, *CPU
    refused(compare.main, words, f"{probe}: no document has two tokens")


# ---- needle suite --------------------------------------------------------------------------------


SUITE = """
[flags]
model = "tiny"
data = "{}"
device = "cpu"
dtype = "float32"
batch_size = 2
seq_len = 16
steps = 5
save_every = 0
eval_every = 2
prove = 2

[[model]]
name = "a small"

[[model]]
name = "long"
steps = 9
schedule = "wsd"
"""


@pytest.fixture
def listed(tmp_path, tokens, here):
    (tmp_path / "pair.toml").write_text(SUITE.format(tokens))
    return tmp_path / "pair.toml"


def test_suite_trains_its_models_with_cards_and_a_page(tmp_path, tokens, listed, monkeypatch):
    assert suite.main([str(listed)]) == 0
    out = tmp_path / "pair"
    for name, steps in ("a small", [0, 1, 2, 4, 5]), ("long", [0, 1, 2, 4, 8, 9]):
        run = ndl.open_run(out / "runs" / name)
        assert run.steps == steps and {*suite.whole_steps(run.folder)} == {*steps}
        model = ndl.models.from_pretrained(out / "models" / name)
        wanted = dict(run.model(steps[-1]).named_parameters())
        assert all((p.numpy() == wanted[n].numpy()).all() for n, p in model.named_parameters())
        text = (out / "models" / name / "README.md").read_text()
        head = re.match(r"---\nlibrary_name: transformers\n((?:.+\n)+)---\n\n# (.+)\n", text)
        assert head[2] == name and "- gpt_neox\n" in head[1]
        manifest = hashlib.sha256((run.folder / "manifest.json").read_bytes()).hexdigest()
        assert f"| `{manifest}` |" in text and "| 29,568 |" in text
        loss = f"{run.metrics['val_loss'][-1]:.4f}"
        assert f"| {steps[-1]} of 2 x 16 tokens |" in text and f"| {loss} nats a token |" in text
        assert f"`{manifest}`" in (out / "README.md").read_text()
    assert run.settings["schedule"] == "wsd"
    # A stranger follows the page.
    monkeypatch.chdir(tmp_path / "pair")
    text = (out / "README.md").read_text()
    commands = re.findall(r"^    needle (.*)$", text, re.M)
    steps = {"a small": "4:5", "long": "8:9"}
    words = ["verify 'runs/a small' --steps 4:5 --data DATA"]
    assert commands == [*words, "verify runs/long --steps 8:9 --data DATA"]
    assert "| [a small](models/a%20small) |" in text
    tokens.rename("DATA")
    for command in commands:
        assert verify.main([*shlex.split(command)[1:], "--device", "cpu"]) == 0
    words = arguments("--steps 0:4 --data DATA --device cpu")
    assert verify.main(["runs/a small", *words]) == 0
    for name, row in zip(steps, re.findall(r"^\| \[.*$", text, re.M), strict=True):
        run = ndl.open_run(f"runs/{name}")
        weights = verify.proofs.digests_of(run.checkpoint())["weights"]
        data = ndl.data.open_data("DATA").fingerprint
        assert f"commit `{verify.proofs.commit()}` | `{data}` | " in row
        assert row.endswith(f" | `{weights}` |")
    assert "&& git -C needle checkout" in text


def test_suite_that_was_killed_goes_on(tmp_path, tokens, listed, monkeypatch, refused):
    assert suite.main([str(listed)]) == 0
    train, whole = replays.train, contents(tmp_path / "pair" / "models")

    def killed(place, launch, flags, quiet):
        if place.name != "long":
            return train(place, launch, flags, quiet)
        run_until(monkeypatch, 6, [*again(place), *flags])
        raise Killed

    words = [str(listed), "--out", str(tmp_path / "other")]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(replays, "train", killed)
        suite.main(words)
    assert not (tmp_path / "other" / "README.md").exists()
    assert suite.main(words) == 0
    assert contents(tmp_path / "other" / "models") == whole
    listed.write_text(SUITE.format(tokens).replace("steps = 9", "steps = 8"))
    error = refused(suite.main, words, "pair.toml: model long: ")
    assert "cannot go on with other settings: --steps is 8, but the run has 9" in error


def test_example_of_the_page_is_read(tmp_path):
    page = (ROOT / "docs/replay.md").read_text()
    (tmp_path / "x.toml").write_text(re.search(r"^```toml\n(\[flags.*?)^```", page, re.M | re.S)[1])
    found = suite.read_suite(tmp_path / "x.toml")
    assert [*found] == ["small", "wide"] and found["wide"][-2:] == ["--lr", "0.0005"]
    assert found["small"][:3] == ["--keep", "log", "--keep-optimizer"]
    with open(tmp_path / "x.toml", "a") as file:
        file.write("keep_optimizer = false\n")
    assert "--keep-optimizer" not in suite.read_suite(tmp_path / "x.toml")["wide"]


def test_page_names_the_repository_unless_it_is_a_path(monkeypatch):
    for origin, told in ("https://x.org/needle", "https://x.org/needle"), ("/x/y", "REPOSITORY"):
        monkeypatch.setattr(suite, "git", lambda *words, origin=origin: origin)
        assert f"    git clone {told} needle &&" in suite.page("pair", {})


def test_bad_lists_and_the_model_whose_training_fails_are_named(
    tmp_path, listed, monkeypatch, refused
):
    text = listed.read_text()
    for content, says, *code in (
        ("x = ", "no TOML"),
        ("", "must hold a table [flags] and tables [[model]] alone"),
        ("model = [1]", "must hold a table [flags]"),
        (text.replace('"long"', '"a small"'), "model 2: needs its own `name`"),
        (text.replace("prove", "out"), "model 1: needs its own `name`, and no out"),
        (text + "warmup = 10", "pair.toml: model long: --warmup 10: "),
        (text + "data = 'none.txt'", "pair.toml: model long: "),
        (text + "tokenizer = 'none.json'", "pair.toml: model long: "),
        (text + "no_mlp = true", "pair.toml: model long: save_pretrained: this model has no MLPs"),
        (text + "improve = 1", "there is --prove\nneedle suite: {}: model long\n", 2),
        (text.replace('"long"', '"../x"'), "'../x'\nneedle suite: {}: model ../x\n", 2),
    ):
        listed.write_text(content)
        refused(suite.main, [listed], says.replace("{}", str(listed)), *code)
    assert not (tmp_path / "pair").exists()
    listed.write_text(text)
    monkeypatch.setattr(replays, "train", lambda *_: 1)
    says = f"model a small: {tmp_path}/other/runs/a small: ended before step 5, with exit code 1"
    refused(suite.main, [listed, "--out", tmp_path / "other"], says)
    refused(suite.main, [listed.rename(tmp_path / "pair")], "--out: ", 2)
    refused(suite.main, ["."], ".: cannot be read: Is a directory")
