"""show_config() and `python -m needle.diagnose` tell the truth and mend nothing."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import run

import needle as ndl
from needle import diagnose
from needle.diagnose import command, facts
from needle.kernels.compile import Toolkit

DIAGNOSE = (sys.executable, "-m", "needle.diagnose")


def test_show_config_prints_its_result():
    text = io.StringIO()
    facts = ndl.show_config(file=text)
    printed = text.getvalue()
    assert facts["needle"] == ndl.__version__ and ndl.__version__ in printed
    assert facts["numpy"] == np.__version__ and np.__version__ in printed
    assert facts["build"]["blas"] in printed and facts["build"]["compiler"] in printed
    assert facts["devices"][0]["device"] == "cpu()" and "cpu()" in printed
    assert facts["cuda"]["usable"] == ndl.cuda().enabled()
    if not facts["cuda"]["usable"]:
        assert facts["cuda"]["problem"] in printed and facts["cuda"]["remedy"] in printed


def test_command_line_tests_each_device():
    done = run(*DIAGNOSE, NEEDLE_REQUIRE_CUDA="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test cpu()     ok" in done.stdout
    assert done.stderr == ""


def test_gpu_that_is_required_and_missing_is_a_failure():
    assert run(*DIAGNOSE, NEEDLE_REQUIRE_CUDA="1", CUDA_VISIBLE_DEVICES="").returncode == 1


def test_gpu_that_is_asked_for_and_missing_is_a_failure():
    done = run(*DIAGNOSE, "--device", "0", NEEDLE_REQUIRE_CUDA="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "test cuda()    FAILED: " in done.stdout
    assert "To mend it: " in done.stdout and "test cpu()     ok" in done.stdout


def test_gpu_that_cannot_be_used_is_a_failure_where_it_should_be(monkeypatch):
    monkeypatch.delenv("NEEDLE_REQUIRE_CUDA", raising=False)
    cuda = {"built": True, "driver": "13.0", "usable": True, "count": 1}
    cuda |= {"problem": "no such device", "remedy": "nvidia-smi"}
    assert command.choose(None, cuda) == ([(0, "cuda()")], [])
    cuda["usable"] = False
    chosen, (failure,) = command.choose(None, cuda)
    assert chosen == [] and failure.has_failed and failure.text == "no such device"
    cuda["driver"] = None  # a machine without a GPU
    assert command.choose(None, cuda) == ([], [])
    assert command.choose(1, cuda) == ([], [])  # torchrun's second rank
    chosen, (failure,) = command.choose(1, cuda, is_asked=True)
    assert chosen == [] and failure.where == "cuda(1)" and failure.remedy == "nvidia-smi"


def test_wrong_product_is_found(monkeypatch):
    class Broken:
        def __matmul__(self, other):
            return self

        def numpy(self):
            return np.zeros((256, 256), np.float32)

    monkeypatch.setattr(diagnose._C, "array", lambda *args, **more: Broken())
    good, text = diagnose.self_test(ndl.cpu())
    assert not good and text.startswith("WRONG")


def test_remedy_fits_the_reason():
    for built, driver, words in (
        (False, None, "driver"),
        (True, None, "driver"),
        (False, "13.0", "NEEDLE_CUDA=1"),
        (True, "13.0", "CUDA_VISIBLE_DEVICES"),
    ):
        assert words in diagnose.remedy(built, driver), (built, driver)


def test_facts_in_words(monkeypatch, capsys):
    facts_of_gpu = ndl.show_config(file=io.StringIO())
    facts_of_gpu["build"] |= {"cuda": "13.0", "cuda_archs": "80 90a"}
    facts_of_gpu["cuda"] |= {"built": True}
    lines = diagnose.lines(facts_of_gpu)
    assert ("CUDA backend", "built with CUDA 13.0 for sm_80, sm_90a") in lines
    assert diagnose.gigabytes(3 * 2**29) == "1.5 GiB"

    def missing():
        raise RuntimeError("no NVRTC: install it")

    monkeypatch.setattr(facts, "find_toolkit", lambda: Toolkit(Path("/cuda/lib/libnvrtc.so"), ()))
    ndl.show_config()
    assert "own kernels    /cuda/lib/libnvrtc.so" in capsys.readouterr().out
    monkeypatch.setattr(facts, "find_toolkit", missing)
    ndl.show_config()
    assert "own kernels    no NVRTC: install it" in capsys.readouterr().out


@pytest.mark.cuda
def test_gpu_is_described():
    facts = ndl.show_config(file=io.StringIO())
    gpu = next(d for d in facts["devices"] if d["device"] == "cuda()")
    assert gpu["arch"] >= 80 and gpu["total_bytes"] > 2**30
    assert diagnose.self_test(ndl.cuda())[0]


def test_help_and_unknown_flags(capsys):
    for words, code in (["--help"], 0), (["--verbose"], 2), (["cuda"], 2), (["-x"], 2):
        with pytest.raises(SystemExit) as caught:
            diagnose.main(words)
        out, error = capsys.readouterr()
        assert caught.value.code == code, words
        if code == 0:
            assert "multiplies two matrices" in out and "device" in out
        else:
            assert out == "" and f"unrecognized arguments: {words[0]}" in error
