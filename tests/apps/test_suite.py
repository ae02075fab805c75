"""needle suite: models trained, their cards, and a page by which a stranger checks an interval."""

import hashlib
import re
import shlex

import pytest
from harness import ROOT
from small_runs import Killed, arguments, contents, run_until

import needle as ndl
from needle.training.folder import again
from needle.training.replay import replays, suite, verify

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


def test_suite_that_was_killed_goes_on(tmp_path, tokens, listed, monkeypatch, capsys):
    assert suite.main([str(listed)]) == 0
    train, whole = replays.train, contents(tmp_path / "pair" / "models")

    def killed(place, launch, flags, quiet):
        if place.name == "long":
            run_until(monkeypatch, 6, [*again(place), *flags])
            raise Killed
        return train(place, launch, flags, quiet)

    words = [str(listed), "--out", str(tmp_path / "other")]
    with monkeypatch.context() as patch:
        patch.setattr(replays, "train", killed)
        with pytest.raises(Killed):
            suite.main(words)
    assert not (tmp_path / "other" / "README.md").exists()
    assert suite.main(words) == 0
    assert contents(tmp_path / "other" / "models") == whole
    listed.write_text(SUITE.format(tokens).replace("steps = 9", "steps = 8"))
    assert suite.main(words) == 1
    says = (
        "pair.toml: model long: .*cannot go on with other settings: --steps is 8, but the run has 9"
    )
    assert re.search(says, capsys.readouterr().err)


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
