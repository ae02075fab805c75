"""The recipe of the published Pythias: its schedules, its settings, its checkpoints, and fifty
steps of a small model beside a PyTorch reference.

The reference is transformers' GPT-NeoX, torch.optim.AdamW and torch's clipping under a schedule
written here; it begins with the weights of needle's checkpoint of step 0 and is fed the batches
that the run drew.
"""

import json
import math

import numpy as np
import pytest
import train_pythia
from harness import DEVICES
from small_runs import arguments, checkpoint_of, lines_of, run_until, tensors_of

from needle import optim
from needle.checkpoint import Checkpoint, list_checkpoints
from needle.models import pythia
from needle.training import run as run_parts
from needle.training import settings as recipes
from needle.training.settings import Settings, complete, parse

SMALL = (2, 64, 4, 128)  # layers, hidden size, heads, vocabulary
STEPS, WARMUP, BATCH, ACCUMULATE, TIME = 50, 5, 4, 4, 32


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setitem(pythia.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(run_parts, "SAMPLE_TOKENS", 4)
    monkeypatch.setattr(run_parts, "plot", lambda folder: "")
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokens(tmp_path):
    """Tokens with something to learn: mostly the last one plus three."""
    random = np.random.RandomState(7)
    jumps = np.where(random.rand(9000) < 0.8, 3, random.randint(0, SMALL[3], 9000))
    path = tmp_path / "tokens.npy"
    np.save(path, (np.cumsum(jumps) % SMALL[3]).astype(np.uint16))
    return path


def flags(tmp_path, tokens, name, *more, recipe="pythia", device="cpu", dtype="float32"):
    return arguments(
        f"--recipe {recipe} --model tiny --device {device} --dtype {dtype} --name {name}",
        *("--data", tokens, "--out", tmp_path / "runs"),
        f"--batch-size {BATCH} --global-batch-size {BATCH * ACCUMULATE} --seq-len {TIME}",
        f"--steps {STEPS} --warmup {WARMUP}",
        *more,
    )


def losses_of(tmp_path, name):
    return [line["loss"] for line in lines_of(tmp_path, name)]


def rate(done, peak=1e-3, total=143_000, warmup=1_430):
    """The rate of the published runs after `done` steps, from the cosine's other formula:
    (1 + cos x) / 2 = cos(x / 2)^2."""
    if done < warmup:
        return peak * done / warmup
    return max(peak * math.cos(math.pi / 2 * (done - warmup) / total) ** 2, peak / 10)


def settings_of(words="", on_gpu=True):
    return complete(parse(words.split()), on_gpu)


# ---- schedules --------------------------------------------------------------------------------


def test_recipe_pythia_follows_the_published_rates():
    schedule = train_pythia.schedule_of(settings_of("--recipe pythia"))
    assert schedule(1) == 0  # the suite's step 1 has the weights of step 0
    steps = [2, 3, 700, 2000, 50_000, 72_931, 120_000, 142_999, 143_000]
    for step in [*steps, *range(1429, 1433), *range(115_139, 115_142)]:
        assert schedule(step) == pytest.approx(rate(step - 1), rel=1e-12), step
    assert schedule(1431) == 1e-3
    assert schedule(115_139) > 1e-4 and schedule(115_141) == schedule(143_000) == 1e-4
    assert schedule(200_000) == schedule(290_000) == 1e-4


def test_recipe_pythia_fixed_follows_the_announced_rates():
    schedule = train_pythia.schedule_of(settings_of("--recipe pythia-fixed"))
    assert schedule(143) == pytest.approx(1e-4) and schedule(1430) == 1e-3
    assert schedule(142_999) > schedule(143_000) == pytest.approx(1e-4, rel=1e-12)
    for step in range(1430, 143_001, 1234):
        wanted = 1e-4 + 9e-4 * math.cos(math.pi / 2 * (step - 1430) / 141_570) ** 2
        assert schedule(step) == pytest.approx(wanted, rel=1e-12), step


def test_schedule_of_each_kind_rises_over_the_warmup_and_ends_at_its_floor():
    for kind, rates in [
        ("constant", (0.1, 0.2, 0.4, 0.4, 0.4, 0.4)),
        ("linear", (0.1, 0.2, 0.4, 0.22, 0.04, 0.04)),
        ("cosine", (0.1, 0.2, 0.4, 0.22, 0.04, 0.04)),
        ("pythia", (0.0, 0.1, 0.3, 0.361803, 0.2, 0.138197)),
    ]:
        settings = Settings(schedule=kind, lr=0.4, warmup=4, steps=10)
        schedule = train_pythia.schedule_of(settings)
        found = [schedule(step) for step in (1, 2, 4, 7, 10, 11)]
        assert found == pytest.approx(rates, rel=1e-5), kind


def test_schedule_of_few_steps():
    schedule = optim.PythiaCosine(1.0, total=100, warmup=0, floor=0.1)
    rates = [schedule(step) for step in (0, 1, 51, 100, 101)]
    assert rates == pytest.approx([1, 1, 0.5, 0.1, 0.1])
    with pytest.raises(ValueError, match="warmup"):
        optim.PythiaCosine(1.0, total=10, warmup=11)


# ---- settings ---------------------------------------------------------------------------------


def test_recipe_of_each_model_is_the_papers():
    names = "steps", "warmup", "lr", "seq_len", "schedule"
    peaks = {"14m": 1e-3, "70m": 1e-3, "160m": 6e-4, "410m": 3e-4, "1b": 3e-4, "1.4b": 2e-4}
    for size, peak in {**peaks, "2.8b": 1.6e-4, "12b": 1.2e-4}.items():
        for on_gpu in True, False:
            settings = settings_of(f"--recipe pythia --model pythia-{size}", on_gpu)
            found = [getattr(settings, name) for name in names]
            assert found == [143_000, 1_430, peak, 2048, "pythia"], size
            assert settings.sequences == 1024, size
            assert (settings.weight_decay, settings.clip) == (0.1, 1.0), size
            assert recipes.changes(settings) == {}, size
    assert settings_of("--recipe pythia-fixed --model pythia-12b").schedule == "cosine"


def test_each_flag_changes_the_recipe():
    assert settings_of("--recipe pythia", on_gpu=False).model == "pythia-70m"
    words = "--recipe pythia --steps 2000 --lr 5e-4 --seq-len 64 --batch-size 2 --seed 3"
    settings = settings_of(words)
    assert (settings.warmup, settings.grad_accum) == (20, 512)
    assert recipes.changes(settings) == {
        "steps": {"recipe": 143_000, "run": 2000},
        "warmup": {"recipe": 1430, "run": 20},
        "lr": {"recipe": 1e-3, "run": 5e-4},
        "seq_len": {"recipe": 2048, "run": 64},
        "seed": {"recipe": 1234, "run": 3},
    }
    settings = settings_of("--recipe pythia --global-batch-size 6 --sparse local")
    assert (settings.batch_size, settings.grad_accum) == (6, 1)
    assert recipes.changes(settings) == {
        "sequences_per_step": {"recipe": 1024, "run": 6},
        "sparse": {"recipe": None, "run": "local"},
    }
    assert settings_of("--recipe pythia --tokens 2_097_153").steps == 2
    assert settings_of("--recipe pythia --warmup 7 --steps 9").warmup == 7
    for recipe in "", "--recipe pythia":
        for flag in "warmup", "weight_decay", "clip", "seed":
            zero = settings_of(f"{recipe} --{flag.replace('_', '-')} 0")
            assert getattr(zero, flag) == 0, (recipe, flag)


def test_sequences_of_a_step_follow_batch_and_accumulation(capsys):
    for words, batch, accumulate in [
        ("--recipe pythia", 16, 64),
        ("--recipe pythia --batch-size 32", 32, 32),
        ("--recipe pythia --grad-accum 4", 256, 4),
        ("--recipe pythia --grad-accum 2 --batch-size 512", 512, 2),
        ("--global-batch-size 24", 12, 2),
        ("--batch-size 3 --grad-accum 5", 3, 5),
    ]:
        settings = settings_of(words)
        assert (settings.batch_size, settings.grad_accum) == (batch, accumulate), words
    for words, said in [
        ("--batch-size 3", "--batch-size 3 cannot make the 1,024 sequences"),
        ("--grad-accum 3", "--grad-accum 3 cannot"),
        ("--grad-accum 2000", "--grad-accum 2000 cannot"),
        ("--batch-size 2 --grad-accum 256", "--batch-size 2 and --grad-accum 256 cannot"),
        ("--batch-size 4 --global-batch-size 6", "4 cannot make the 6 sequences a step of"),
    ]:
        assert train_pythia.main(f"--recipe pythia --device cpu {words}".split()) == 1
        error = capsys.readouterr().err
        assert said in error and "must be exactly that many" in error, words


# ---- a run ------------------------------------------------------------------------------------


def test_recipe_decays_and_initialises_as_published(tmp_path, tokens):
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--steps", "1", "--warmup", "1")) == 0
    model, optimizer, _, loss = train_pythia.load_checkpoint(checkpoint_of(tmp_path, "a", 0))
    assert math.isnan(loss)  # there has been none
    own = optimizer.state_dict()["groups"]
    for name, parameter in model.named_parameters():
        kept = name.endswith(".weight") and "norm" not in name
        assert own.get(name, {}).get("weight_decay", optimizer.weight_decay) == 0.1 * kept, name
        value = parameter.numpy()
        if not kept:
            assert np.all(value == ("norm" in name and name.endswith("weight"))), name
            continue
        writes = name.endswith(("attention.dense.weight", "dense_4h_to_h.weight"))
        wanted = 2 / (2 * math.sqrt(64)) if writes else math.sqrt(2 / (5 * 64))
        assert value.std() == pytest.approx(wanted, rel=0.05), name
    assert model.config.hidden_act == "gelu_new"
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)
    description = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert description["recipe"]["name"] == "pythia"
    assert description["recipe"]["changed"]["steps"] == {"recipe": 143_000, "run": 1}
    assert description["optimizer"]["beta2"] == 0.95


def test_published_steps_are_those_of_the_suite():
    early = [step for step in range(1000) if recipes.keeps(recipes.PUBLISHED)(step)]
    assert early == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    later = [step for step in range(1000, 143_001) if recipes.keeps(recipes.PUBLISHED)(step)]
    assert later == list(range(1000, 143_001, 1000)) and len(early + later) == 154


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_checkpoints_stay_through_kills(
    tmp_path, tokens, monkeypatch, device, dtype, capsys
):
    options = dict(device=device, dtype=dtype)
    more = ["--steps", "14", "--save-every", "3"]
    assert train_pythia.main(flags(tmp_path, tokens, "whole", *more, **options)) == 0
    folders = [tmp_path / "runs" / name / "checkpoints" for name in ("whole", "parts")]
    names = [f"step_{step}.safetensors" for step in (14, 12, 9, 8, 4, 2, 1, 0)]
    # 9 is proven: --save-every finite steps followed it.
    assert [path.name for path in list_checkpoints(folders[0])] == names

    argv = flags(tmp_path, tokens, "parts", *more, "--resume", "auto", **options)
    for last in (1, 4, 12):  # the newest checkpoints are then those of steps 0, 3 and 9
        run_until(monkeypatch, last, argv)
    short = arguments("--resume auto --name parts --device", device, "--out", tmp_path / "runs")
    for recipe, said in [
        ("pythia-fixed", "--recipe is pythia-fixed, but the run has pythia"),
        ("pythia --global-batch-size 8", "--global-batch-size is 8, but the run has 16"),
    ]:
        assert train_pythia.main([*short, *arguments("--recipe " + recipe)]) == 1
        assert said in capsys.readouterr().err
    words = "--recipe pythia --global-batch-size 16".split()
    assert train_pythia.main([*short, *words]) == 0
    assert losses_of(tmp_path, "parts") == losses_of(tmp_path, "whole")
    assert [path.name for path in list_checkpoints(folders[1])] == names
    for name in names:
        assert len({tensors_of(folder / name) for folder in folders}) == 1, name
    assert Checkpoint(folders[0] / names[-1]).state["step"] == 0


# ---- beside PyTorch ---------------------------------------------------------------------------


def recorded_run(tmp_path, tokens, monkeypatch, name, **options):
    """(losses, batches as the run drew them, the model of step 0)."""
    forward_backward, drawn = train_pythia.forward_backward, []

    def recording(model, ids, targets, share):
        drawn.append(
            tuple(
                np.array(x.numpy() if hasattr(x, "numpy") else x, np.int64) for x in (ids, targets)
            )
        )
        return forward_backward(model, ids, targets, share)

    with monkeypatch.context() as patch:
        patch.setattr(train_pythia, "forward_backward", recording)
        argv = [*flags(tmp_path, tokens, name, **options), "--no-graph"]  # or it is called once
        assert train_pythia.main(argv) == 0
    model, *_ = train_pythia.load_checkpoint(checkpoint_of(tmp_path, name, 0))
    return losses_of(tmp_path, name), drawn, model


def reference_run(model, drawn, recipe, precision):
    """Losses of the same steps in PyTorch, from the same weights. precision: "float32"; "bfloat16"
    is weights and activations in it, with float32 copies of the weights in the optimizer and
    float32 sums of gradients, as in needle."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    layers, width, heads, vocabulary = SMALL
    net = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            hidden_act="gelu_new",
            max_position_embeddings=TIME,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000,
                "partial_rotary_factor": 0.25,
            },
        )
    )
    ours = {name: np.array(p.numpy(), np.float32) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in net.named_parameters():
            short = name.removeprefix("gpt_neox.").replace("lm_head.", "embed_out.")
            value = torch.from_numpy(ours.pop(short))
            p.copy_(value.T if p.ndim == 2 and short != "embed_in.weight" else value)
    assert not ours
    masters = [torch.nn.Parameter(p.detach().clone()) for p in net.parameters()]
    if precision == "bfloat16":
        net.bfloat16()
    shares = ("weight_decay", 0.1), ("weight_decay", 0.0)
    groups = [
        {"params": [m for m in masters if (m.ndim >= 2) == (value > 0)], key: value}
        for key, value in shares
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        if recipe == "pythia":
            lr = rate(step, total=STEPS, warmup=WARMUP)
        else:
            past = (step + 1 - WARMUP) / (STEPS - WARMUP)
            lr = (
                1e-3 * (step + 1) / WARMUP
                if past < 0
                else (1e-4 + 9e-4 * math.cos(math.pi / 2 * past) ** 2)
            )
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        total = 0.0
        for ids, targets in drawn[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
            net.zero_grad()
            logits = net(input_ids=torch.from_numpy(ids)).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), torch.from_numpy(targets).flatten()
            )
            (loss / ACCUMULATE).backward()
            total += loss.item() / ACCUMULATE
            for master, p in zip(masters, net.parameters()):
                grad = p.grad.float()
                master.grad = grad if master.grad is None else master.grad + grad
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, net.parameters()):
                p.copy_(master)
        losses.append(total)
    return losses


@pytest.mark.parity
@pytest.mark.parametrize("recipe", [*recipes.SCHEDULES])
@pytest.mark.parametrize("device", DEVICES)
def test_fifty_steps_in_float32_have_pytorchs_losses(tmp_path, tokens, monkeypatch, recipe, device):
    options = dict(recipe=recipe, device=device)
    ours, drawn, model = recorded_run(tmp_path, tokens, monkeypatch, "a", **options)
    theirs = reference_run(model, drawn, recipe, "float32")
    assert len(ours) == STEPS and ours[-1] < ours[0] - 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize("device", DEVICES)
def test_fifty_steps_in_bfloat16_stay_as_near_as_pytorchs(tmp_path, tokens, monkeypatch, device):
    """The distance is that to PyTorch's float32, from the same weights, which needle rounded to
    bfloat16 before the first step."""
    options = dict(device=device, dtype="bfloat16")
    ours, drawn, start = recorded_run(tmp_path, tokens, monkeypatch, "low", **options)
    exact = reference_run(start, drawn, "pythia", "float32")
    theirs = reference_run(start, drawn, "pythia", "bfloat16")
    own, other = (np.abs(np.subtract(losses, exact)) for losses in (ours, theirs))
    assert math.sqrt(np.mean(own**2)) <= 1.5 * math.sqrt(np.mean(other**2))
    assert own.max() <= 2 * other.max()
