"""show_config() and `needle diagnose` as a user runs them, in a checkout or from a wheel."""

import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from harness import ROOT, run

import needle as ndl
from needle.diagnose import facts
from needle.testing import OPS

DIAGNOSE = (sys.executable, "-m", "needle.diagnose")


def test_show_config_prints_its_result(monkeypatch):
    monkeypatch.setattr(facts, "gpus", lambda: [ndl.cpu()])  # one that is none
    text = io.StringIO()
    shown = ndl.show_config(file=text)
    printed = text.getvalue()
    assert shown["needle"] == ndl.__version__ and ndl.__version__ in printed
    assert shown["numpy"] == np.__version__ and np.__version__ in printed
    assert shown["build"]["blas"] in printed and shown["build"]["compiler"] in printed
    assert [found["device"] for found in shown["devices"]] == ["cpu()"] * 2
    assert printed.count(shown["devices"][0]["name"]) == 2
    assert (shown["nvrtc"].get("path") or shown["nvrtc"]["problem"]) in printed
    assert shown["cuda"]["usable"] == ndl.cuda().enabled()
    if not shown["cuda"]["usable"]:
        assert shown["cuda"]["problem"] == ndl.cuda().reason()
        assert f"cuda()         not usable: {ndl.cuda().reason()}" in printed


def test_driver_that_is_not_initialized_is_none(monkeypatch):
    driver = SimpleNamespace(cuDriverGetVersion=lambda place: 3)
    monkeypatch.setattr(facts.ctypes, "CDLL", lambda name: driver)
    assert facts.driver_version() is None


def test_diagnosis_of_a_cpu_prints_the_facts_and_every_op():
    """Secrets among the variables are left out, and ops are not traced."""
    hidden = dict.fromkeys(("NEEDLE_KERNELS_TOKEN", "NEEDLE_RANKS_KEY"), "unspeakable" * 2)
    given = {"NEEDLE_REQUIRE_CUDA": "0", "CUDA_VISIBLE_DEVICES": "", "NEEDLE_TRACE": "1"}
    done = run(*DIAGNOSE, **given, **hidden)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "unspeakable" not in done.stdout
    assert not re.search("^needle: ", done.stdout, re.MULTILINE)
    assert done.stdout.count("(hidden)") == 2
    for label in ("needle", "Python", "NumPy", "BLAS", "NVIDIA driver", "cpu()"):
        assert f"\n{label:<15}" in f"\n{done.stdout}", label
    assert "cuda()         not usable: " in done.stdout
    points = rf"^cpu\(\)          ok: {len(OPS)} ops agree with float64 references at \d+ points$"
    assert re.search(points, done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("in short       nothing is wrong (")


def test_diagnosis_runs_nothing_of_the_current_folder(tmp_path):
    """Files with the names of modules that it imports."""
    for name in ("typing", "json", "selectors", "numpy", "needle", "platform", "traceback"):
        (tmp_path / f"{name}.py").write_text(f"open({name!r}, 'w')\nraise SystemExit('{name}')\n")
    before = set(tmp_path.iterdir())
    command = sys.executable, ROOT / "checkout.py", "diagnose", "--run", tmp_path
    done = run(*command, cwd=tmp_path, NEEDLE_REQUIRE_CUDA="0", PYTHONPATH=None)
    assert set(tmp_path.iterdir()) == before
    assert done.stderr == "" and f"{len(OPS)} ops agree with float64" in done.stdout
    assert f"run            FAILED: {tmp_path} is not the folder of a run" in done.stdout


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.cuda
def test_gpu_is_right():
    facts = ndl.show_config(file=io.StringIO())
    gpu = next(device for device in facts["devices"] if device["device"] == "cuda()")
    assert gpu["arch"] >= 80 and gpu["total_bytes"] > 2**30
    done = run(*DIAGNOSE)
    assert done.returncode == 0 and gpu["uuid"] in done.stdout, done.stdout + done.stderr
    assert f"cuda()         ok: {len(OPS)} ops agree" in done.stdout
    assert re.search(r"^GPU \d+          ok: NVIDIA", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), pytest.param(("--device", "0"), marks=pytest.mark.cuda)])
def test_device_is_right_at_every_point(words):
    done = run(*DIAGNOSE, "--full", *words)
    assert done.returncode == 0, done.stdout + done.stderr
