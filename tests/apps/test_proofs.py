"""Lines of proof and manifest.json, by hashlib and NumPy from what the run has left."""

import hashlib
import json
import shlex
import sys

import numpy as np
import pytest
import train_pythia
from harness import ROOT, naming
from harness import run as run_program
from small_runs import (
    TOKENS,
    all_lines_of,
    chain,
    checkpoint_of,
    flags,
    lines_of,
    proofs_of,
    read_tensors,
    rewrite,
    run_until,
)
from struck_runs import ENVIRON, Runs, missing, mpirun, write_tokens

from needle import _C
from needle.optim import Cosine
from needle.training.replay import proofs

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


def batch_of(step, micro_batches=2, batch=2, length=16):
    """The hash of a step's ids."""
    found, count = hashlib.sha256(), len(TOKENS) * 95 // 100 // length
    for number in range((step - 1) * micro_batches, step * micro_batches):
        epoch, at = divmod(number, count // batch)
        order = np.random.Generator(np.random.PCG64([1234, epoch])).permutation(count)
        starts = [i * length for i in order[at * batch : (at + 1) * batch]]
        for shift in 0, 1:
            ids = [TOKENS[i + shift : i + shift + length] for i in starts]
            found.update(np.array(ids, "<i4").tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_line_of_proof_holds_hashes_of_batch_weights_and_moments(tmp_path, tokens, dtype):
    assert train_pythia.main(flags(tmp_path, tokens, "a", EVERY, dtype=dtype)) == 0
    lines, told = all_lines_of(tmp_path, "a"), proofs_of(tmp_path, "a")
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
    since, text = hashlib.sha256(), (tmp_path / "runs" / "a" / "metrics.jsonl").read_text()
    for line, value in zip(text.splitlines(), lines):
        if "digest" in value:
            assert value["previous"] == since.hexdigest()
            since = hashlib.sha256()
        since.update(f"{line}\n".encode())


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
    head = run_program("git", "-C", ROOT, "rev-parse", "HEAD").stdout.strip() or None
    assert (told["commit"] and told["commit"].removesuffix("+")) == head
    assert float.fromhex(told["settings"]["lr"]) == config["settings"]["lr"] == 3e-3
    assert train_pythia.main(["--resume", str(checkpoint_of(tmp_path, "a", 4))]) == 0
    assert (folder / "manifest.json").read_text() == text


def test_commit_has_a_plus_where_files_were_changed_since(monkeypatch):
    for head, status, wanted in (("abc", "", "abc"), ("abc", "M x", "abc+"), ("", "", None)):
        said = {"rev-parse": head, "status": status}
        monkeypatch.setattr(proofs, "git", lambda word, *_, said=said: said[word])
        assert proofs.commit() == wanted


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
