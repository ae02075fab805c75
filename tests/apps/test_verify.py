"""needle verify: whole runs, and each kind of fault by its name; lines of proof, manifest.json."""

import hashlib
import json
import shlex
import shutil
import sys

import numpy as np
import pytest
import train_pythia
from harness import ROOT, flip_bit, naming
from harness import run as run_program
from small_runs import (
    CPU,
    TOKENS,
    arguments,
    chain,
    checkpoint_of,
    flags,
    lines_of,
    micro_batches,
    proofs_of,
    read_tensors,
    retell,
    rewrite,
    run_until,
    without,
)
from struck_runs import ENVIRON, Runs, missing, mpirun, write_tokens

from needle import _C
from needle.optim import Cosine
from needle.training import open_run
from needle.training.replay import proofs, replays, verify
from needle.training.settings import parse

KEEP = "--keep 2,4,... --keep-optimizer"
BIT = {"layers.1.mlp.dense_h_to_4h.weight": ((3, 17), 0x3F000001)}


@pytest.fixture
def folder(tmp_path, tokens, here):
    """A run of 6 steps with the checkpoints 2, 4 and 6, each proven, and 3 proven too."""
    assert train_pythia.main(flags(tmp_path, tokens, "a", KEEP, "--prove 3")) == 0
    return tmp_path / "runs" / "a"


@pytest.fixture
def verdicts(tmp_path, capsys):
    """verdicts(folder, *words) -> (exit code, {what is not equal: (result, what, step)}, all)"""

    def run(folder, *words):
        file = tmp_path / "verdicts.json"
        file.unlink(missing_ok=True)
        words = ["--device", "cpu", str(folder), "--json", str(file), *words]
        code = verify.main(words)
        left = [path.name for path in folder.parent.iterdir() if path.name[0] == "."]
        assert left == [], "folders that are left"
        if not file.exists():
            return code, capsys.readouterr().err, {}
        told = {verdict["of"]: verdict for verdict in json.loads(file.read_text())["verdicts"]}
        keys = "result", "what", "step"
        wrong = {of: tuple(v[key] for key in keys) for of, v in told.items() if v["what"]}
        wrong |= {of: v["result"] for of, v in told.items() if v["what"] is None and
                  v["result"] == "undecided"}  # fmt: skip
        return code, wrong, told

    return run


def edit_json(file, **changes):
    """Change a JSON file, each part by its keys."""
    told = json.loads(file.read_text())
    for part, values in changes.items():
        told[part] = {**told[part], **values} if isinstance(values, dict) else values
    file.write_text(json.dumps(told, sort_keys=True, separators=(",", ":")) + "\n")


def cut_off(path):
    path.write_text(path.read_text() + '{"step": 7, "lo')


def edit_everywhere(folder, **settings):
    """Claim other settings, in each file of a run."""
    data = {"seed": settings["data_seed"]} if "data_seed" in settings else {}
    edit_json(folder / "config.json", settings=settings, data=data)
    hexed = {name: x.hex() if isinstance(x, float) else x for name, x in settings.items()}
    edit_json(folder / "manifest.json", settings=hexed, data=data)
    for file in (folder / "checkpoints").glob("step_*"):
        rewrite(file, {"settings": read_tensors(file)[0]["settings"] | settings})


def test_run_is_equal_between_checkpoints_and_from_the_initial_state(folder, verdicts, monkeypatch):
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (0, {})
    assert [*told] == ["metrics.jsonl", "data", "step_2.safetensors", "step_4.safetensors",
                       "step_6.safetensors", "settings", "steps 1 to 2",
                       "steps 3 to 4", "steps 5 to 6"]  # fmt: skip
    assert told["steps 3 to 4"]["scope"] == "recomputed here from the checkpoint of step 2"
    assert told["steps 3 to 4"]["text"] == "2 line(s), 2 proof(s), 1 checkpoint(s)"
    code, wrong, told = verdicts(folder, "--full")
    assert (code, wrong) == (0, {}) and told["steps 1 to 6"]["text"].endswith("3 checkpoint(s)")
    assert told["steps 1 to 6"]["scope"] == "recomputed here from the initial state"
    for words, wanted in (
        (("--steps", "0:3"), ["steps 1 to 3"]),
        (("--steps", "2:6"), ["steps 3 to 6"]),
        (("--sample", "1", "--seed", "3"), ["steps 1 to 2"]),
        (("--sample", "9", "--seed", "3"), ["steps 1 to 2", "steps 3 to 4", "steps 5 to 6"]),
    ):
        with naming(words):
            code, wrong, told = verdicts(folder, *words)
            assert (code, wrong) == (0, {}) and [of for of in told if of[:6] == "steps "] == wanted
    code, wrong, told = verdicts(folder, "--steps", "2:5")
    assert (code, wrong) == (4, {"steps 3 to 5": "undecided"})
    monkeypatch.setattr(replays, "train", lambda *_: pytest.fail("it trains"))
    retell(folder, 6, seconds=600.0)
    for words, first, last in (
        (["--full"], 0, 6),
        (["--steps", "2:6"], 2, 6),
        (["--sample", "1", "--seed", "0"], 2, 4),
    ):
        assert verdicts(folder, *words, "--dry-run") == (0, {}, {})
        plan = json.loads((folder.parent.parent / "verdicts.json").read_text())["plan"]
        assert plan["intervals"] == [[first, last]] and plan["steps"] == last - first
        assert plan["seconds"] == 100 * plan["steps"]
    assert plan["seed"] == 0


def flip(folder):
    """Change a bit of the weights in the checkpoint of step 4, whose checksum stays."""
    file = folder / "checkpoints" / "step_4.safetensors"
    flip_bit(file, verify.Checkpoint(file).tensors[[*BIT][0]].offset + 4 * 7)


def swap_token(folder, step):
    """Change a token that the first sequence of a step reads."""
    tokens = TOKENS.copy()
    order = np.random.Generator(np.random.PCG64([1234, 0])).permutation(25)
    tokens[order[2 * (step - 1)] * 16 + 3] += 1
    np.save(folder.parent.parent / "tokens.npy", tokens)


def lines(keeps):
    """Cut lines of metrics.jsonl, in a new chain."""
    return lambda folder: chain(folder, lambda lines: [line for line in lines if keeps(line)])


def told(*step, **values):
    return lambda folder: retell(folder, *step, **values)


def stored(state=(), words=()):
    """Change the checkpoint of step 4."""
    return lambda folder: rewrite(folder / "checkpoints" / STEP_4, state, words)


def forged(library=None):
    """A bit of the checkpoint of step 4, whose line of proof says so."""

    def forge(folder):
        stored({} if library is None else {"products": library}, BIT)(folder)
        file = folder / "checkpoints" / STEP_4
        retell(folder, 4, True, digest=verify.proofs.digests_of(verify.Checkpoint(file)))

    return forge


def other_rate(folder):
    file = folder / "checkpoints" / STEP_4
    rewrite(file, {"settings": read_tensors(file)[0]["settings"] | {"lr": 2e-3}})


def other_step(folder):
    shutil.copy(checkpoint_of(folder.parent.parent, "a", 2), folder / "checkpoints" / STEP_4)


def other_blank(folder):
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('{"step": 3, "tok', '{"step":3, "tok'))


def put_in(folder, at, line):
    """Put a line behind those of the first steps."""
    log = folder / "metrics.jsonl"
    lines = log.read_text().splitlines()
    before = sum(json.loads(text).get("step", 0) <= at for text in lines)
    log.write_text("\n".join([*lines[:before], line, *lines[before:]]) + "\n")


DIFFERS, UNDECIDED = "differs", "undecided"
STEP_4, ONE, THREE, FIVE = "step_4.safetensors", "steps 1 to 2", "steps 3 to 4", "steps 5 to 6"
HOST, CUDA = "AVX2 and OpenBLAS 0.2.1", "cuBLASLt 13.1 on NVIDIA H100"
WEIGHTS, FILE = ((DIFFERS, what, 4) for what in ("weights", "file"))
BEHIND, ALL_BEHIND = {FIVE: UNDECIDED}, {ONE: UNDECIDED, THREE: UNDECIDED, FIVE: UNDECIDED}
SETTINGS, LATER = (DIFFERS, "settings", None), {FIVE: (DIFFERS, "weights", 5)}
EACH = {ONE: 1, THREE: 3, FIVE: 5}
FAULTS = {
    "a bit of the weights": (stored(words=BIT), {STEP_4: WEIGHTS, THREE: WEIGHTS} | BEHIND),
    "a bit of the weights, in a file as a disk has it": (
        flip, {STEP_4: FILE, THREE: WEIGHTS} | BEHIND,
    ),
    "a bit and its proof": (forged(), {THREE: WEIGHTS} | LATER),
    "a bit and its proof, of another library": (
        forged(HOST), {THREE: (UNDECIDED, "library or table", 4)} | LATER,
    ),
    "a bit and its proof, of another GPU": (
        forged(CUDA), {THREE: (UNDECIDED, "GPU kind", 4)} | LATER,
    ),
    "a damaged file": (
        lambda folder: (folder / "checkpoints" / STEP_4).write_bytes(b"0" * 999),
        {STEP_4: FILE} | BEHIND,
    ),
    "a checkpoint of another step": (other_step, {STEP_4: FILE} | BEHIND),
    "a changed token": (
        lambda folder: swap_token(folder, 4), {"data": (DIFFERS, "data", 4)} | ALL_BEHIND,
    ),
    "a changed token that no line of proof has": (
        lambda folder: swap_token(folder, 5), {"data": (DIFFERS, "data", None)} | ALL_BEHIND,
    ),
    "fewer tokens": (
        lambda folder: np.save(folder.parent.parent / "tokens.npy", TOKENS[:50]),
        {"data": (DIFFERS, "data", None)} | ALL_BEHIND,
    ),
    **{
        f"a line of proof of position {batch!r}": (
            told(6, True, position={"epoch": 0, "batch": batch}),
            {
                "data": (DIFFERS, "order", None),
                "step_6.safetensors": (DIFFERS, "order", 6),
                FIVE: (DIFFERS, "line", 6),
            },
        )
        for batch in (99, "x")
    },
    "a changed line": (other_blank, {"metrics.jsonl": (DIFFERS, "line", 3)}),
    **{
        f"another {name} in a new chain": (told(6, **{name: 9.0}), {FIVE: (DIFFERS, "line", 6)})
        for name in ("loss", "lr", "grad_norm", "val_loss")
    },
    "lines cut from the middle, in a new chain": (
        lines(lambda x: x["step"] != 3 or "digest" in x), {"metrics.jsonl": (DIFFERS, "line", 3)},
    ),
    "lines cut from the end": (
        lines(lambda x: x["step"] < 6), {"step_6.safetensors": (DIFFERS, "line", 6)},
    ),
    "a line put in that is no JSON": (
        lambda folder: put_in(folder, 3, "hello"), {"metrics.jsonl": (DIFFERS, "line", 3)},
    ),
    "a line of a step after the last": (
        lambda folder: put_in(folder, 99, '{"step": 7, "tokens": 1, "loss": 1.0, "lr": 0.1}'),
        {"metrics.jsonl": (DIFFERS, "line", 7)},
    ),
    "a damaged last line": (lambda folder: cut_off(folder / "metrics.jsonl"), {}),
    "another rate in config.json": (
        lambda folder: edit_json(folder / "config.json", settings={"lr": 2e-3}),
        {"settings": SETTINGS, ONE: (DIFFERS, "learning rate", 1), THREE: UNDECIDED} | BEHIND,
    ),
    "another rate in a checkpoint": (other_rate, {"settings": SETTINGS} | BEHIND),
    "another position in a checkpoint": (
        stored({"data": {"epoch": 0, "batch": 3}}), {STEP_4: (DIFFERS, "order", 4)} | BEHIND,
    ),
    "another rate in a line of proof": (
        told(4, True, lr=1e-5.hex()), {THREE: (DIFFERS, "line", 4)},
    ),
    "another rate in all files": (
        lambda folder: edit_everywhere(folder, lr=2e-3),
        {steps: (DIFFERS, "learning rate", first) for steps, first in EACH.items()},
    ),
    "another order in all files": (
        lambda folder: edit_everywhere(folder, data_seed=9),
        {steps: (DIFFERS, "order", first) for steps, first in ({"data": 2} | EACH).items()},
    ),
    "another first model in manifest.json": (
        lambda folder: edit_json(folder / "manifest.json", weights="0" * 64),
        {ONE: (DIFFERS, "weights", 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_named(folder, verdicts, fault):
    make, wanted = FAULTS[fault]
    make(folder)
    code, wrong, told = verdicts(folder)
    results = {x if isinstance(x, str) else x[0] for x in wrong.values()}
    assert wrong == wanted, json.dumps(told, indent=1)
    assert code == (3 if DIFFERS in results else 4 if UNDECIDED in results else 0)


def test_kept_weights_are_compared(tmp_path, tokens, here, monkeypatch, verdicts):
    run_until(monkeypatch, 3, flags(tmp_path, tokens, "a", "--keep 0,9"))
    words = "--resume auto --keep 3,5 --name a --out", tmp_path / "runs"
    assert train_pythia.main(arguments(*CPU, *words)) == 0
    folder, kept = tmp_path / "runs" / "a", "weights_{}.safetensors".format
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (0, {}) and {kept(0), kept(3), kept(5)} <= told.keys()
    assert told["steps 1 to 4"]["text"].endswith("3 checkpoint(s)")
    files = folder / "checkpoints"
    shutil.copy(files / kept(3), files / kept(5))
    rewrite(files / kept(3), words=BIT)
    wanted = {kept(5): (DIFFERS, "file", 5), FIVE: (DIFFERS, "weights", 5)}
    wanted["steps 1 to 4"] = (DIFFERS, "weights", 3)
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (3, wanted)
    assert told["steps 1 to 4"]["tensor"]["index"] == [3, 17]
    rewrite(files / kept(0), words=BIT)
    wanted["steps 1 to 4"] = (DIFFERS, "weights", 0)
    assert verdicts(folder)[:2] == (3, wanted)


def test_initial_state_does_not_depend_on_the_checkpoint_of_step_0(
    tmp_path, tokens, here, verdicts
):
    keep = "--keep 0,2 --keep-optimizer"
    assert train_pythia.main(flags(tmp_path, tokens, "a", keep, steps=2)) == 0
    folder = tmp_path / "runs" / "a"
    edit_json(folder / "config.json", settings={"lr": 2e-3})
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (3, {"settings": SETTINGS, ONE: (DIFFERS, "learning rate", 1)})
    files = "manifest.json, step_0.safetensors, step_2.safetensors"
    assert told["settings"]["text"].endswith(f"in config.json, {(3e-3).hex()} in {files}")


def test_checkpoint_that_the_run_removes_meanwhile_is_undecided(folder, verdicts, monkeypatch):
    check = verify.check_data

    def removing(claims):
        claims.files[2].unlink()
        return check(claims)

    monkeypatch.setattr(verify, "check_data", removing)
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (4, {"step_2.safetensors": UNDECIDED, THREE: UNDECIDED})
    assert "step 2 is gone" in told[THREE]["text"]


def test_proof_of_the_last_step_decides_where_there_is_no_checkpoint(folder, verdicts):
    digests = verify.proofs.Log(folder / "metrics.jsonl").proofs[3]["digest"]
    retell(folder, 3, True, digest=digests | {"weights": "0" * 64})
    assert verdicts(folder, "--steps", "2:3")[1] == {"steps 3 to 3": (DIFFERS, "weights", 3)}
    assert verdicts(folder)[1] == {THREE: (DIFFERS, "line", 3)}


def test_numbers_that_differ_are_named_with_both_values(tmp_path, tokens, here, verdicts):
    argv = flags(tmp_path, tokens, "a", KEEP, steps=4, dtype="bfloat16")
    assert train_pythia.main(argv) == 0
    folder, word = tmp_path / "runs" / "a", 0x3F81  # 1.0078125
    file = checkpoint_of(tmp_path, "a", 4)
    before = read_tensors(file)[1]["layers.0.attention.dense.weight"][7, 9]
    whole = shutil.copy(file, tmp_path / "whole.safetensors")
    names = "layers.0.attention.dense.weight", "layers.0.mlp.dense_4h_to_h.weight"
    rewrite(file, words={name: ((7, 9), word) for name in names})
    code, wrong, told = verdicts(folder, "--full")
    assert code == 3 and wrong["steps 1 to 4"] == (DIFFERS, "weights", 4)
    value = float((np.uint32(before) << np.uint32(16)).view(np.float32))
    assert told["steps 1 to 4"]["tensor"] == {
        "name": "layers.0.attention.dense.weight",
        "index": [7, 9],
        "run": (1.0078125).hex(),
        "here": value.hex(),
        "count": 2,
    }
    shutil.copy(whole, file)
    for slot, what in ("master", "weights"), ("v", "moments"):
        rewrite(file, words={f"optimizer.{slot}.embed_in.weight": ((1, 2), 0x3F000001)})
        assert verdicts(folder)[1][THREE] == (DIFFERS, what, 4)
        assert verdicts(folder)[1][STEP_4] == (DIFFERS, what, 4)
        shutil.copy(whole, file)
    edit_json(folder / "manifest.json", weights="0" * 64)
    assert verdicts(folder, "--full")[1]["steps 1 to 4"] == (DIFFERS, "weights", 0)


def test_products_that_were_others_and_gave_equal_bits_are_equal(folder, verdicts):
    edit_json(folder / "manifest.json", products=HOST)
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (0, {}) and f"the run multiplied by {HOST}, this" in told[FIVE]["text"]
    edit_json(folder / "manifest.json", products=verify.Claims(folder, parse([])).products)
    for file in (folder / "checkpoints").glob("step_*"):
        rewrite(file, {"products": HOST})
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (0, {}) and f"the run multiplied by {HOST}, this" in told[FIVE]["text"]


def test_run_without_manifest_is_verified_by_its_checkpoints(folder, verdicts):
    """As one of an older needle."""
    (folder / "manifest.json").unlink()
    chain(folder, lambda lines: [line for line in lines if "digest" not in line])
    edit_json(folder / "config.json", settings={})
    code, wrong, told = verdicts(folder)
    assert (code, wrong) == (0, {})
    assert told["settings"]["text"].endswith("; there is no manifest.json")
    assert told["steps 3 to 4"]["text"] == "2 line(s), 0 proof(s), 1 checkpoint(s)"
    rewrite(folder / "checkpoints" / STEP_4, words=BIT)
    code, wrong, told = verdicts(folder)
    assert code == 3 and wrong[THREE] == (DIFFERS, "weights", 4)
    assert told[THREE]["tensor"]["name"] == [*BIT][0] and told[THREE]["tensor"]["count"] == 1
    assert wrong[FIVE] == (DIFFERS, "weights", 5)  # it began with the changed one


def test_run_that_was_killed_or_went_on_is_verified(tmp_path, tokens, here, monkeypatch, verdicts):
    run_until(monkeypatch, 5, flags(tmp_path, tokens, "a", KEEP))
    assert verdicts(tmp_path / "runs" / "a")[:2] == (0, {})
    run_until(monkeypatch, 3, flags(tmp_path, tokens, "b", "--save-every 0 --prove 1"))
    code, wrong, _ = verdicts(tmp_path / "runs" / "b")
    assert (code, wrong) == (4, {"steps": "undecided"})
    assert verdicts(tmp_path / "runs" / "b", "--full")[:2] == (0, {})
    words = flags(tmp_path, tokens, "c", KEEP, "--schedule constant --warmup 0", steps=4)
    for more in [], ["--resume", "auto", "--steps", "6"]:
        assert train_pythia.main([*words, *more]) == 0
    assert verdicts(tmp_path / "runs" / "c")[:2] == (0, {})


def test_first_steps_of_a_run_whose_weights_are_gone_are_undecided(
    tmp_path, tokens, folder, verdicts
):
    """Those of a run are of the checkpoint that was its newest one."""
    argv = without(flags(tmp_path, tokens, "b", KEEP, "--init", folder, steps=4), "--model")
    assert train_pythia.main(argv) == 0
    assert verdicts(tmp_path / "runs" / "b")[:2] == (0, {})
    file = folder / "checkpoints" / "step_6.safetensors"
    shutil.copy(file.with_name("step_4.safetensors"), file.with_name("step_8.safetensors"))
    assert verdicts(tmp_path / "runs" / "b")[:2] == (0, {})
    shutil.rmtree(folder)
    code, wrong, told = verdicts(tmp_path / "runs" / "b")
    assert (code, wrong) == (4, {ONE: UNDECIDED})
    assert told[ONE]["text"] == f"the first model is that of {file}, which is not here"


def test_bits_of_another_commit_are_undecided_and_equal_ones_name_it(folder, verdicts, monkeypatch):
    edit_json(folder / "manifest.json", commit="a" * 40)
    monkeypatch.setattr(verify.proofs, "commit", lambda: "b" * 40)
    forged()(folder)
    code, wrong, told = verdicts(folder)
    assert code == 4 and wrong[THREE] == (UNDECIDED, "commit", 4)
    assert f"begun by commit {'a' * 40}, this is {'b' * 40}" in told[ONE]["text"]


def test_replay_with_edits_is_verified_with_them(folder, verdicts):
    edits = [
        {"do": "drop", "where": {"step": 6, "row": 1}, "fill": "mask"},
        {"do": "rate", "steps": [4, 6], "factor": 0.5},
    ]
    verify_folder = open_run(folder).replay(3, edits, name="edited", flags=CPU).folder
    code, wrong, told = verdicts(verify_folder)
    assert (code, wrong) == (0, {}) and told["steps 3 to 4"]["text"].startswith("2 line(s), 2")
    assert verdicts(verify_folder, "--full")[:2] == (0, {})
    shutil.copytree(verify_folder, bare := folder.parent / "bare")
    shutil.rmtree(bare / "checkpoints")  # as of a bank's replay
    assert verdicts(bare)[0] == 4 and verdicts(bare, "--full")[:2] == (0, {})
    file = verify_folder / "replay.json"
    file.write_text(file.read_text().replace("0.5", "0.25"))
    code, wrong, _ = verdicts(verify_folder)
    assert wrong == {"steps 3 to 4": (DIFFERS, "learning rate", 4),
                     "steps 5 to 6": (DIFFERS, "learning rate", 5)}  # fmt: skip


def test_errors_are_named(tmp_path, folder, verdicts, monkeypatch, refused):
    begin = "--steps: of {} it can begin with one of [0, 2, 4, 6] and end at 6 or before"
    for steps in "1:4", "2:7":
        refused(verify.main, [folder, *CPU, "--steps", steps], begin.format(folder))
    wrong = [["--steps", "4:2"], ["--steps", "x"], ["--sample", "1", "--full"], ["--bad"]]
    wrong += [["--launch", "'"], ["--name", "b"], ["--out", "x"], ["--resume", "auto"]]
    for words in *wrong, ["--seed", "1"]:
        refused(verify.main, [folder, *words], words[0], 2)
    assert verdicts(folder, "--data", str(tmp_path / "none.npy"))[0] == 4
    assert verdicts(folder, "--steps", "0:2", "--out", "runs")[:2] == (0, {})
    refused(verify.main, [tmp_path / "none", *CPU], "none/config.json: cannot be read")
    (folder / "tokenizer.json").write_text("{}")
    assert "not a tokenizer.json" in verdicts(folder)[2]["data"]["text"]
    (folder / "tokenizer.json").unlink()
    (folder / "manifest.json").write_text("{")
    refused(verify.main, [folder, *CPU], "manifest.json: no JSON")
    (folder / "manifest.json").unlink()
    for code in 75, 0:  # 0: a signal stopped it
        monkeypatch.setattr(replays, "train", lambda *_, code=code, **__: code)
        found, err, _ = verdicts(folder)  # which asks for what is left
        says = f"again: ended before step 2, with exit code {code}"
        assert found == 1 and says in err


# ---- lines of proof, by hashlib and NumPy from what the run has left -----------------------------


EVERY = "--keep 0,1,2,... --keep-optimizer --grad-accum 2"


def digest(data: bytes) -> str:
    """The root of the tree of BLAKE2s hashes."""
    leaves = lambda data: b"".join(
        hashlib.blake2s(data[at : at + 1024]).digest() for at in range(0, len(data), 1024)
    )
    data = leaves(data)
    while len(data) > 1 << 16:
        data = leaves(data)
    return hashlib.blake2s(data).hexdigest()


def flat(words, names, prefix=""):
    """Parameters one after the other, each at a multiple of 64 elements."""
    parts = [words[prefix + name].ravel() for name in names]
    return b"".join(np.append(x, np.zeros(-x.size % 64, x.dtype)).tobytes() for x in parts)


def batch_of(step):
    """The hash of a step's ids, of two micro-batches."""
    found = hashlib.sha256()
    for pair in [*micro_batches(1234, 2 * step)][-2:]:
        for ids in pair:
            found.update(ids.astype("<i4").tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_line_of_proof_holds_hashes_of_batch_weights_and_moments(tmp_path, tokens, dtype):
    assert train_pythia.main(flags(tmp_path, tokens, "a", EVERY, dtype=dtype)) == 0
    told = proofs_of(tmp_path, "a")
    assert [*told] == [1, 2, 3, 4, 5, 6]
    schedule = Cosine(3e-3, 6, 0, floor=3e-3 / 10)
    for step, proof in told.items():
        state, words = read_tensors(checkpoint_of(tmp_path, "a", step))
        names, norm = state["optimizer"]["names"], lines_of(tmp_path, "a")[step - 1]["grad_norm"]
        slots = ["m", "v"] + ["master"] * (dtype == "bfloat16")
        wanted = {slot: digest(flat(words, names, f"optimizer.{slot}.")) for slot in slots}
        with naming(step):
            assert proof["digest"] == {"weights": digest(flat(words, names)), **wanted}
            assert proof["batch"] == batch_of(step)
            assert proof["position"] == state["data"]
            assert float.fromhex(proof["lr"]) == schedule(step)
            assert float.fromhex(proof["scale"]) == pytest.approx(min(1, 1 / norm), rel=1e-5)


def test_digest_of_an_array_is_that_of_its_tree():
    data = np.random.default_rng(0).integers(0, 256, 2_500_003).astype(np.uint8)
    for size in (1, 1024, 1025, 2_097_152, 2_097_153, 2_500_003):
        with naming(size):
            assert proofs.digest(_C.array(data[:size], "uint8")) == digest(data[:size].tobytes())


def test_manifest_is_canonical_and_describes_the_first_model(tmp_path, tokens):
    assert train_pythia.main(flags(tmp_path, tokens, "a", EVERY)) == 0
    folder = tmp_path / "runs" / "a"
    text = (folder / "manifest.json").read_text()
    config = json.loads((folder / "config.json").read_text())
    told = json.loads(text, parse_float=lambda number: pytest.fail(f"a binary float: {number}"))
    assert text == json.dumps(told, sort_keys=True, separators=(",", ":")) + "\n"
    state, words = read_tensors(checkpoint_of(tmp_path, "a", 0))
    assert told["weights"] == digest(flat(words, state["optimizer"]["names"]))
    assert told["products"] == state["products"] and told["versions"] == config["versions"]
    assert told["data"] == config["data"] and told["recipe"] is told["tokenizer"] is None
    head = run_program("git", "-C", ROOT, "rev-parse", "HEAD").stdout.strip() or "unknown"
    assert told["commit"].removesuffix("+") == head
    assert float.fromhex(told["settings"]["lr"]) == config["settings"]["lr"] == 3e-3
    assert train_pythia.main(["--resume", str(checkpoint_of(tmp_path, "a", 4))]) == 0
    assert (folder / "manifest.json").read_text() == text


def test_commit_is_that_of_the_checkout_or_of_the_installed_build(tmp_path, monkeypatch):
    commit = proofs.commit.__wrapped__  # which asks git each time
    monkeypatch.setattr(proofs, "__file__", str(tmp_path / "needle/training/replay/proofs.py"))
    assert commit() == _C.build_info()["commit"]
    (tmp_path / "a").write_text("1")
    git = "git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a"
    for words in ("init", "add a", "commit -m a"):
        assert run_program(*git, *words.split()).returncode == 0
    head = run_program(*git, "rev-parse", "HEAD").stdout.strip()
    assert commit() == head
    (tmp_path / "a").write_text("2")
    assert commit() == f"{head}+"


def test_chain_finds_a_line_that_was_changed_cut_or_put_in(tmp_path, tokens):
    assert train_pythia.main(flags(tmp_path, tokens, "a", "--prove 0")) == 0
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)  # 1, 2, P2, 3, 4, P4, 5, 6, P6
    assert proofs.Log(log).broken == []
    for name, changed, broken, *strange in (
        ("a changed loss", [*lines[:3], lines[3].replace("loss", "lost"), *lines[4:]], [(2, 4)]),
        ("a changed proof", [*lines[:2], lines[2].replace('"lr"', '"lR"'), *lines[3:]], [(2, 4)]),
        ("a line less", lines[:3] + lines[4:], [(2, 4)]),
        ("a line more", [*lines[:4], lines[3], *lines[4:]], [(2, 4)]),
        ("a proof less", lines[:5] + lines[6:], [(2, 6)]),
        ("an order", [lines[1], lines[0], *lines[2:]], [(0, 2)]),
        ("lines cut from the end", lines[:6], []),  # which checkpoints show: test_verify.py
        ("a damaged last line", [*lines, '{"step'], []),
        ("no JSON", [*lines[:4], "hello\n", *lines[4:]], [], (3, "is no JSON")),
        ("of no step", [*lines, '{"hello": 1}\n'], [], (6, "is of no step")),
        ("the last step again", [*lines, lines[-2]], [], (6, "tells of a step again")),
        ("the last proof again", [*lines, lines[-1]], [], (6, "tells of a step again")),
    ):
        log.write_text("".join(changed))
        with naming(name):
            assert proofs.Log(log).broken == broken
            assert not strange or proofs.Log(log).strange == strange
    log.write_text("".join(lines))
    chain(log.parent)
    assert log.read_text() == "".join(lines)


def test_run_of_an_older_needle_is_proven_from_its_resume_on(tmp_path, tokens, run, monkeypatch):
    assert run("whole") == 0
    run_until(monkeypatch, 5, flags(tmp_path, tokens, "a"))
    folder, file = tmp_path / "runs" / "a", checkpoint_of(tmp_path, "a", 4)
    settings = read_tensors(file)[0]["settings"]
    del settings["prove"]
    rewrite(file, {"settings": settings})
    (folder / "manifest.json").unlink()
    chain(folder, lambda lines: [line for line in lines if "digest" not in line])
    assert train_pythia.main(["--resume", str(folder)]) == 0
    assert proofs_of(tmp_path, "a") == {6: proofs_of(tmp_path, "whole")[6]}
    assert proofs.Log(folder / "metrics.jsonl").broken == []


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=f"needle: {missing()}")
def test_ranks_prove_the_same_and_verify_each_other(tmp_path):
    runs = Runs(tmp_path / "runs", write_tokens(tmp_path / "tokens.npy"), "--prove", "7")
    told = []
    for ranks in (0, 2, 4):
        runs.run(f"r{ranks}", ranks)
        told.append(proofs_of(tmp_path, f"r{ranks}"))
    assert len(told[0]) > 8 and told[1] == told[0] and told[2] == told[0]
    words = ["--launch", f"{shlex.join(mpirun())} -n 2", "--device", "cpu", "--steps", "40:56"]
    for name in "r0", "r4":
        command = [sys.executable, "-m", "needle", "verify", tmp_path / "runs" / name, *words]
        done = run_program(*command, **ENVIRON)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "steps 41 to 56: equal: 16 line(s), 3 proof(s)" in " ".join(done.stdout.split())
