"""What benchmarks share: flags, devices, sizes; and benchmarks/kernels.py on the CPU."""

import sys
from types import SimpleNamespace

import bench
import kernels
import pytest
from harness import naming, run

import needle as ndl
from needle import _C, testing


def test_device_and_dtype_follow_each_other_unless_they_are_named(monkeypatch):
    parser = bench.parser("", bench.DEVICE, bench.DTYPE)
    monkeypatch.setattr(bench, "need_gpu", lambda: "the GPU")
    for words, has_gpu, wanted in (
        ("", False, (ndl.cpu(), "float32")),
        ("", True, ("the GPU", "bfloat16")),
        ("--device cpu", True, (ndl.cpu(), "float32")),
        ("--device cpu --dtype bfloat16", True, (ndl.cpu(), "bfloat16")),
        ("--dtype float32", True, ("the GPU", "float32")),
    ):
        gpu = SimpleNamespace(enabled=lambda has=has_gpu: has)
        monkeypatch.setattr(ndl, "cuda", lambda gpu=gpu: gpu)
        args = parser.parse_args(words.split())
        with naming(words, has_gpu):
            assert (bench.device_of(args), args.dtype) == wanted
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--device", "tpu"])


def test_calls_of_a_sample_fill_its_time():
    for each, count in (2.0, 3), (50.0, 1):  # milliseconds
        assert bench.repeats_for(6.0, lambda call, n, each=each: n * each, print) == count


def test_tokens_of_generation_are_those_of_all_rows():
    words = "--device cpu --model tiny --batch-size 1 3 --new-tokens 4 --samples 1 --baseline none"
    done = run(sys.executable, "benchmarks/generate.py", *words.split())
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("needle  ")]
    assert [row[1] for row in rows] == ["1", "3"], done.stderr
    for _, batch, median, *_, step, tokens, _ in rows:
        assert float(step) == pytest.approx(float(median) / 4 * 1e3, rel=1e-3)
        rate = int(batch) * 4 / float(median) * 1e3
        assert float(tokens.replace(",", "")) == pytest.approx(rate, abs=1)


def test_kernels_are_those_named_in_their_size_and_dtype(monkeypatch, capsys):
    copy, samples = testing.copy_case, []
    some = {name: testing.OPS[name] for name in ("exp", "expm1", "add", "assign", "fill")}
    monkeypatch.setattr(testing, "OPS", some)
    monkeypatch.setattr(testing, "copy_case", lambda op, shape: copy(op, (min(8, *shape),) * 2))
    monkeypatch.setattr(bench, "repeats_for", lambda *_: samples.append(0) or 1)
    timer = lambda call, count: samples.append(call()) or 1.0
    monkeypatch.setattr(bench, "needle_timer", lambda device: timer)
    words = "--device cpu --only exp fill --size 8 --rounds 3 --dtype bfloat16"
    monkeypatch.setattr(sys, "argv", ["kernels.py", *words.split()])
    kernels.main()
    about, _, _, *rows = capsys.readouterr().out.splitlines()
    assert "; bfloat16; " in about
    assert [row.split()[:2] for row in rows] == [["exp", "8x8"], ["expm1", "8x8"], ["fill", "8x8"]]
    assert len(samples) == 5 * 4  # of the copy and of an empty launch too
    assert {x.dtype for x in samples if isinstance(x, _C.NDArray)} == {"bfloat16"}
