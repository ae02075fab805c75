"""The recipe of the published Pythias: its schedules, settings and checkpoints; those of --keep.
(Its updates are those of every run: test_loop.py.)"""

import json
import math

import numpy as np
import pytest
import train_pythia
from harness import naming
from small_runs import checkpoint_of
from small_runs import flags as small_flags

import needle as ndl
from needle.checkpoint import Checkpoint, list_checkpoints, step_of, weights_path
from needle.training.keep import keeps
from needle.training.run import is_kept, keeps_weights
from needle.training.settings import PUBLISHED, changes, complete, parse


def flags(tmp_path, tokens, *more, **options):
    name, *more = more
    recipe = "--recipe pythia --global-batch-size 8 --warmup 1"
    return small_flags(tmp_path, tokens, name, recipe, *more, **options)


def rate(done, peak=1e-3, total=143_000, warmup=1_430):
    """The rate of the published runs after `done` steps, from the cosine's other formula:
    (1 + cos x) / 2 = cos(x / 2)^2."""
    if done < warmup:
        return peak * done / warmup
    return max(peak * math.cos(math.pi / 2 * (done - warmup) / total) ** 2, peak / 10)


def settings_of(words="", on_gpu=True):
    return complete(parse(words.split()), on_gpu)


def test_recipes_follow_the_published_and_the_announced_rates():
    schedule = train_pythia.schedule_of(settings_of("--recipe pythia"))
    assert schedule(1) == 0  # the suite's step 1 has the weights of step 0
    steps = [2, 3, 700, 2000, 50_000, 72_931, 120_000, 142_999, 143_000]
    for step in [*steps, *range(1429, 1433), *range(115_139, 115_142)]:
        assert schedule(step) == pytest.approx(rate(step - 1), rel=1e-12), step
    assert schedule(1431) == 1e-3
    assert schedule(115_139) > 1e-4 and schedule(115_141) == schedule(143_000) == 1e-4
    fixed = train_pythia.schedule_of(settings_of("--recipe pythia-fixed"))
    assert fixed(143) == pytest.approx(1e-4) and fixed(1430) == 1e-3
    assert fixed(142_999) > fixed(143_000) == pytest.approx(1e-4, rel=1e-12)
    for step in range(1430, 143_001, 1234):
        wanted = 1e-4 + 9e-4 * math.cos(math.pi / 2 * (step - 1430) / 141_570) ** 2
        assert fixed(step) == pytest.approx(wanted, rel=1e-12), step
    few = train_pythia.schedule_of(settings_of("--schedule wsd --steps 2 --warmup 0 --lr 1"))
    assert [few(1), few(2)] == [1, pytest.approx(0.1)]  # there is a step of decay at least


# ---- settings ---------------------------------------------------------------------------------


def test_recipe_of_each_model_is_the_papers():
    names = "steps", "warmup", "lr", "seq_len", "schedule", "sequences", "weight_decay", "clip"
    peaks = {"14m": 1e-3, "70m": 1e-3, "160m": 6e-4, "410m": 3e-4, "1b": 3e-4, "1.4b": 2e-4}
    for size, peak in {**peaks, "2.8b": 1.6e-4, "12b": 1.2e-4}.items():
        for on_gpu in True, False:
            settings = settings_of(f"--recipe pythia --model pythia-{size}", on_gpu)
            found = [getattr(settings, name) for name in names]
            assert found == [143_000, 1_430, peak, 2048, "pythia", 1024, 0.1, 1.0], size
            assert changes(settings) == {}, size
    assert settings_of("--recipe pythia-fixed --model pythia-12b").schedule == "cosine"


def test_each_flag_changes_the_recipe():
    assert settings_of("--recipe pythia", on_gpu=False).model == "pythia-70m"
    words = "--recipe pythia --steps 2000 --lr 5e-4 --seq-len 64 --batch-size 2 --seed 3"
    settings = settings_of(words)
    assert (settings.warmup, settings.grad_accum) == (20, 512)
    assert changes(settings) == {
        "steps": {"recipe": 143_000, "run": 2000},
        "warmup": {"recipe": 1430, "run": 20},
        "lr": {"recipe": 1e-3, "run": 5e-4},
        "seq_len": {"recipe": 2048, "run": 64},
        "seed": {"recipe": 1234, "run": 3},
    }
    assert changes(settings_of("--recipe pythia --global-batch-size 6 --sparse local")) == {
        "sequences_per_step": {"recipe": 1024, "run": 6},
        "sparse": {"recipe": None, "run": "local"},
    }
    assert settings_of("--recipe pythia --tokens 2_097_153").steps == 2
    assert settings_of("--recipe pythia --warmup 7 --steps 9").warmup == 7
    for recipe in "", "--recipe pythia":
        for flag in "warmup", "weight_decay", "clip", "seed":
            zero = settings_of(f"{recipe} --{flag.replace('_', '-')} 0")
            assert getattr(zero, flag) == 0, (recipe, flag)


def test_sequences_of_a_step_follow_batch_and_accumulation_and_suit_the_ranks():
    for words, ranks, batch, accumulate in [
        ("--recipe pythia", 1, 16, 64),
        ("--recipe pythia --batch-size 32", 1, 32, 32),
        ("--recipe pythia --grad-accum 4", 1, 256, 4),
        ("--recipe pythia --grad-accum 2 --batch-size 512", 1, 512, 2),
        ("--batch-size 3 --grad-accum 5", 1, 3, 5),
        ("", 1, 16, 1),
        ("", 4, 16, 4),
        ("--context-parallel 2", 4, 16, 2),
        ("--grad-accum 8", 4, 16, 8),
        ("--global-batch-size 24", 1, 12, 2),
        ("--global-batch-size 16", 2, 8, 2),
        ("--global-batch-size 12", 2, 6, 2),
        ("--global-batch-size 24", 4, 6, 4),
        ("--global-batch-size 48", 3, 16, 3),
        ("--global-batch-size 64 --batch-size 2", 8, 2, 32),
    ]:
        settings = complete(parse(words.split()), on_gpu="recipe" in words, ranks=ranks)
        assert (settings.batch_size, settings.grad_accum) == (batch, accumulate), words


def test_values_at_their_limits_are_taken():
    for words in (
        "--steps 6 --warmup 6",
        "--steps 3 --warmup 9 --schedule constant",  # it may stop within its warmup
        "--steps 10 --warmup 8 --schedule wsd",
        "--steps 10 --warmup 0 --schedule wsd --decay-share 1",
        "--seed 4294967295 --init-seed 0",
    ):
        settings = settings_of(words)
        for flag, value in zip(words.split()[::2], words.split()[1::2]):
            taken = str(getattr(settings, flag[2:].replace("-", "_")))
            assert taken in (value, f"{value}.0"), words


# ---- a run ------------------------------------------------------------------------------------


def test_published_checkpoints_stay_and_changes_of_the_recipe_are_described(tmp_path, tokens):
    early = [step for step in range(1000) if keeps(PUBLISHED)(step)]
    assert early == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    later = [step for step in range(1000, 143_001) if keeps(PUBLISHED)(step)]
    assert later == list(range(1000, 143_001, 1000)) and len(early + later) == 154
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--save-every 3", steps=14)) == 0
    paths = list_checkpoints(tmp_path / "runs" / "a" / "checkpoints")
    # 9 is proven: --save-every finite steps followed it.
    assert [step_of(path) for path in paths] == [14, 12, 9, 8, 4, 2, 1, 0]
    assert [Checkpoint(path).state["step"] for path in paths] == [*map(step_of, paths)]
    loss = train_pythia.load_checkpoint(paths[-1])[3]
    assert math.isnan(loss)  # there has been none
    description = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert description["recipe"]["name"] == "pythia"
    assert description["recipe"]["changed"]["steps"] == {"recipe": 143_000, "run": 14}
    assert description["optimizer"]["beta2"] == 0.95
    assert description["model"]["hidden_act"] == "gelu_new"


# ---- checkpoints that are kept -------------------------------------------------------------------


def test_steps_follow_the_pattern_before_the_dots():
    for text, wanted in (
        ("1,2,4,...,512,1000,...", [*(2**i for i in range(10)), *range(1000, 5001, 1000)]),
        ("log", [0, *(2**i for i in range(13))]),
        ("0,1,2,4,...,8", [0, 1, 2, 4, 8]),
        ("5", [5]),
        ("3,9,27,...", [3, 9, 27, 81, 243, 729, 2187]),
        ("10,20,...,45", [10, 20, 30, 40, 45]),
        ("0,500,...", range(0, 5001, 500)),
        ("7,10,13,...,22,2000,...", [7, 10, 13, 16, 19, 22, 2000, 4000]),
        ("1,5,6", [1, 5, 6]),
        ("5,1000,2000,3000,...", [5, *range(1000, 5001, 1000)]),
    ):
        with naming(text):
            assert [step for step in range(5001) if keeps(text)(step)] == list(wanted)
            assert keeps(text)(10**15) == text.endswith(("000,...", "0,500,..."))
    wrong = ["", "a", "1,2,", "2,1", "2,2", "...", "0,...", "1,2,4,9,...", "4,6,9,...", "-1"]
    for text in *wrong, "1,...,...", "1,...,x", "1.5":
        with naming(repr(text)), pytest.raises(ValueError, match="no whole number|no numbers of"):
            keeps(text)


def test_recipe_keeps_whole_checkpoints_and_keep_the_weights_of_others():
    for more, third in ("", (False, True)), ("--keep-optimizer", (True, False)):
        settings = complete(parse(f"--recipe pythia --keep 2,3 {more}".split()), False)
        found = [(is_kept(settings, step), keeps_weights(settings, step)) for step in (2, 3, 5)]
        assert found == [(True, False), third, (False, False)]


def test_kept_weights_are_those_of_their_steps(tmp_path, run):
    for name, more in ("every", "--keep 0,1,... --keep-optimizer"), ("kept", "--keep 0,1,2,4,..."):
        assert run(name, more) == 0
    every, kept = (ndl.open_run(tmp_path / "runs" / name) for name in ("every", "kept"))
    assert kept.steps == [0, 1, 2, 4, 6] and every.steps == list(range(7))
    ids, folder = np.arange(12).reshape(1, 12), kept.folder / "checkpoints"
    for step in kept.steps:
        wanted = every.model(step)(ids)[0].numpy()
        assert (kept.model(step)(ids)[0].numpy() == wanted).all(), step
    path = weights_path(folder, 2)
    assert path.stat().st_size < 0.6 * checkpoint_of(tmp_path, "every", 2).stat().st_size
    model, optimizer, _, loss = ndl.load_checkpoint(path)
    assert optimizer is None and loss == kept.metrics["loss"][1]
    assert (ndl.Pythia.from_pretrained(path)(ids)[0].numpy() == model(ids)[0].numpy()).all()
    # A run goes on from a whole checkpoint, never from weights.
    for path in folder.glob("step_*"):
        path.unlink()
    for place in kept.folder, weights_path(folder, 4):
        assert train_pythia.main(["--resume", str(place)]) == 1
