"""The log of a run: the bar of a terminal, the numbers in it, metrics.jsonl, the plot, and
trackers, by packages that record their calls."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import types

import numpy as np
import pytest
import train_pythia
from harness import naming, python
from small_runs import flags, lines_of, run_until

import needle as ndl
from needle.backend_ndarray import full
from needle.files import Lock
from needle.training import log as logs
from needle.training import plot as plots
from needle.training.peaks import peak
from needle.training.settings import Settings

pytest.importorskip("tqdm")


@pytest.fixture
def now(monkeypatch):
    """The clock of the log, a list of one number of seconds."""
    seconds = [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: seconds[0])
    return seconds


def log_of(folder, start, steps, tokens, flops=1.0):
    """The log of a run from step `start` on, with steps of so many tokens."""
    settings = Settings(batch_size=1, grad_accum=1, seq_len=tokens, dtype="float32")
    model = types.SimpleNamespace(flops_per_token=lambda length: flops)
    made = {"settings": settings, "folder": folder, "lock": Lock(folder), "device": ndl.cpu()}
    return logs.RunLog(types.SimpleNamespace(**made, step=start, until=steps, model=model))


def queue(log, step, loss):
    loss = full((), loss, "float32", ndl.cpu())
    log.queue(step, [loss], loss, 1e-3, "")


@pytest.mark.parametrize(
    "steps, done, speed, begins",
    [
        (246, 181, 17_100, "181/246 loss 3.63 17k tok/s left 1:05 |"),
        (140_774, 9, 1_119_000, "9/140774 loss 3.63 1.1M tok/s left 39:06:05 |"),
    ],
)
def test_bar_fits_80_columns(tmp_path, monkeypatch, now, capsys, steps, done, speed, begins):
    ends = pty.openpty()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(ends[1], "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        log = log_of(tmp_path, 0, steps, speed)
        for step in range(1, done + 1):
            now[0] += 1.0  # a step a second
            queue(log, step, 3.6312)
        log.finish(val_loss=3.5)
        assert f"step {done}/{steps}  held-out loss 3.5000\n" in capsys.readouterr().out
        os.set_blocking(ends[0], False)
        os.read(ends[0], 1 << 20)
        log._bar.refresh()
        line = os.read(ends[0], 1000).decode().strip("\r").rpartition("\r")[2]
        log.close()
    os.close(ends[0])
    assert line.startswith(begins) and len(line) <= 80
    assert len(line) - len(begins) >= 15 and line.rstrip().endswith("|")


def test_plain_lines_are_flushed_one_by_one(tmp_path, monkeypatch, now):
    class Pipe(io.StringIO):
        sent = ""

        def flush(self):
            self.sent = self.getvalue()

    pipe = Pipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(logs, "peak", lambda name, dtype: 1e15)
    log = log_of(tmp_path, 99_999, 143_000, 1 << 20, 1e9)
    monkeypatch.setattr(log, "_memory", lambda: 70.12 * 2**30)
    now[0] += 10
    norm = full((), 3.5, "float32", ndl.cpu())
    log.queue(100_000, [full((), 10.8251, "float32", ndl.cpu())], norm, 1e-3, "")
    log.finish(val_loss=10.5, val_bits_per_byte=2.25)
    line, held_out = pipe.sent.splitlines()
    assert line.split("  ") == [
        "step 100000/143000", "loss 10.8251", "lr 1.0e-03", "norm 3.50", "105k tok/s", "MFU 10%",
        "70 GiB", "left 119:26:40",
    ]  # fmt: skip
    assert "10.5000, 2.2500 bits" in held_out
    assert [*logs.Log(log.path).steps] == [100_000]
    log.close()


def test_plain_lines_are_some_forty_with_the_first_of_a_start_and_the_last(tmp_path, now, capsys):
    log = log_of(tmp_path, 4, 103, 32)
    for step in range(5, 104):
        now[0] += 1.0
        queue(log, step, 2.0)
    log.finish()
    log.close()
    shown = re.findall(r"^step (\d+)/103 .* ([\d.]+) GiB ", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _ in shown] == [5, *range(6, 103, 3), 103]
    assert all(float(memory) > 0 for _, memory in shown)  # this process has some 100 MiB


@pytest.fixture
def axes_of(monkeypatch):
    """axes_of(function, arguments) -> the axes of the figure that it draws."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    def draw(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", lambda figure: None)
            assert not function(*arguments)
            axes = pyplot.gcf().axes
        pyplot.close("all")
        return axes

    return draw


def test_figure_of_several_runs(tmp_path, monkeypatch, axes_of, refused):
    """$ in a name begins no formula, of which this is none. Lines of 50 values are smoothed."""

    def drawn(*words):
        [axes] = axes_of(plots.main, words)
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        assert dots and all(line.get_xdata()[0] == 3 * 4096 for line in dots)
        return legend, [line.get_ydata() for line in axes.lines if line not in dots], axes

    monkeypatch.chdir(tmp_path)
    curves = {
        "a$b_{$": np.linspace(9, 3, 50) + np.arange(50) % 3,
        "c/a$b_{$": np.linspace(8, 4, 49),
    }
    for name, losses in curves.items():
        lines = [{"step": n, "tokens": n * 4096, "loss": x} for n, x in enumerate(losses, 1)]
        for line in lines[2::3]:
            line["val_loss"] = line["loss"]
        (tmp_path / name).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text + '{"step": 99, "los')
    legend, values, axes = drawn("a$b_{$", "--out=one.svg")
    assert legend == ["training, smoothed", "held out"] and axes.get_title() == "a$b_{$"
    assert "100k" in {tick.get_text() for tick in axes.get_xticklabels()}
    assert (tmp_path / "one.svg").read_text().startswith("<?xml")
    raw, smooth = sorted(values, key=np.std)[::-1]
    np.testing.assert_allclose(raw, curves["a$b_{$"])
    assert len(smooth) == 50 and np.abs(np.diff(smooth[2:-2])).max() < 1.1
    np.testing.assert_allclose(smooth[[0, -1]], [raw[0], raw[-2:].mean()])  # of what is there
    legend, values, _ = drawn("a$b_{$", "c/a$b_{$")
    assert legend == ["a$b_{$", "c/a$b_{$"] and (tmp_path / "loss.png").exists()
    assert any(len(y) == 49 and np.allclose(y, curves["c/a$b_{$"]) for y in values)
    assert drawn("c/a$b_{$")[0] == ["training", "held out"]
    assert (tmp_path / "c" / "a$b_{$" / "loss.png").exists()
    for word in "no", ".":
        refused(plots.main, [word], f"needle plot: {word}: no step yet, or not a run\n")


def test_figures_of_compare_show_the_last_step_by_document_and_effects_over_predictions(
    tmp_path, axes_of
):
    shape = {"kind": "loss", "run": "runs/b$_{$"}
    rows = [
        {**shape, "step": step, "document": text, "difference": step * size}
        for step in (2, 4)
        for text, size in ((0, 1), (1, 3), ("all", 2))
    ]
    effects = [
        {"kind": "effect", "document": text, "predicted": 5, "difference": size}
        for text, size in ((0, 6), ("all", 7))
    ]
    axes = axes_of(plots.draw_differences, rows, tmp_path / "a.svg")
    axes += axes_of(plots.draw_effects, effects, tmp_path / "b.svg")
    shown = [[line.get_xydata().tolist() for line in one.lines] for one in axes]
    assert shown == [[[[2, 4], [4, 8]]], [[[0, 4], [1, 12]]], [[[5, 6]], [[5, 7]]]]
    assert axes[1].get_title() == "step 4"


def test_peaks_are_those_of_the_first_name_that_fits():
    names = "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "Tesla T4"
    assert [peak(name, "memory") for name in names] == [2.0e12, 3.35e12, None]


def test_plot_needs_no_backend_of_a_notebook(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "loss": 2.0}\n')
    code = f"from needle.training import plot; print(plot.main([{str(tmp_path)!r}]))"
    done = python(code, MPLBACKEND="module://not_installed.backend")
    assert done.stdout.endswith("0\n") and (tmp_path / "loss.png").exists(), done.stderr


def test_without_matplotlib_it_is_named(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 9, "loss": 2.0}\n')
    said = "needs matplotlib: pip install matplotlib"
    assert plots.plot(tmp_path) == f"no loss.png: {said}"
    refused(plots.main, [tmp_path], said)
    with pytest.raises(RuntimeError, match=said):  # of needle compare
        plots.draw_differences([], tmp_path / "a.svg")


STEP = {"step": 2, "tokens": 64, "loss": 8.0}
DAMAGED = [b"", b"{half", b"\xff\xfe", b"\x00", b"[]", b"3", b"null", b"[" * 100_000]
DAMAGED += [b'{"loss": 1.5}', b'{"step": 1.5, "tokens": 64, "loss": 8.0}']
DAMAGED += [
    json.dumps(STEP | {name: value}).encode()
    for name in (*STEP, "val_loss")
    for value in ("x", None, [1], True, 10**400)
]


def test_damaged_lines_are_left_out_by_every_reader(tmp_path, now):
    pytest.importorskip("matplotlib")
    (tmp_path / "config.json").write_text("{}")
    first = b'{"step": 1, "tokens": 32, "loss": 9.0, "seconds": 1.5}'
    second = b'{"step": 2, "tokens": 64, "loss": 8.0, "seconds": 3.25}'
    for damage in DAMAGED:
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, damage, second, damage]))
        with naming(damage[:60]):
            run = ndl.open_run(tmp_path).metrics
            assert [run["step"].tolist(), run["loss"].tolist()] == [[1, 2], [9.0, 8.0]]
            log = log_of(tmp_path, 2, 5, 32)
            log.close()
            assert (log.first_loss, log.seconds) == (9.0, 3.25)
            assert (tmp_path / "metrics.jsonl").read_bytes() == first + b"\n" + second + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, *DAMAGED, second]))
    assert plots.main([str(tmp_path)]) == 0
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(DAMAGED))
    assert plots.main([str(tmp_path)]) == 1 and plots.plot(tmp_path).startswith("no loss.png: noth")


# ---- TensorBoard and Weights & Biases ------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What the packages are called with, by fakes that hide real ones."""
    made = []

    class Writer:
        def __init__(self, folder, purge_step):
            made.append(("open", os.path.realpath(folder), purge_step))

        add_scalar = staticmethod(lambda *scalar: made.append(scalar))
        flush = staticmethod(lambda: made.append("flush"))
        close = staticmethod(lambda: made.append("close"))

    def init(project, name, dir, id, resume, config):
        if project == "forbidden":
            raise RuntimeError("not logged in")
        assert resume == "allow" and os.path.isdir(dir)
        made.append((project, name, id, config["steps"]))
        return types.SimpleNamespace(
            log=made.append, define_metric=lambda *given, **more: None, finish=offline
        )

    def offline():
        raise RuntimeError("no network")

    for name, content in ("tensorboardX", {"SummaryWriter": Writer}), ("wandb", {"init": init}):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
    return made


def test_trackers_get_each_line_through_a_kill(tmp_path, tokens, monkeypatch, calls, capsys):
    argv = flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "pythias")
    run_until(monkeypatch, 5, argv)
    first, place = calls[:], os.path.realpath(tmp_path / "runs" / "a" / "tensorboard")
    calls.clear()
    assert first[0] == ("open", place, 1) and first[1][:2] == ("pythias", "a")
    assert first.count("flush") == 2 and first[-1] == "close"  # a flush with each checkpoint
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    assert "needle train: no network\n" in capsys.readouterr().err
    assert calls[0] == ("open", place, 5)  # TensorBoard drops step 5 of the first part
    assert calls[1] == first[1]  # under the same id
    lines = lines_of(tmp_path, "a")
    found = [call for call in first + calls if type(call) is tuple and len(call) == 3]
    scalars = [(k, v, line["step"]) for line in lines for k, v in line.items() if k != "step"]
    assert [call for call in found if call[0] != "open"] == scalars
    assert [call for call in first + calls if type(call) is dict] == lines


def test_tracker_that_cannot_be_used_says_why(tmp_path, tokens, monkeypatch, calls, refused):
    for flag, said in (
        ("--wandb forbidden", "--wandb forbidden: not logged in (WANDB_MODE=offline"),
        ("--tensorboard", "--tensorboard needs the package tensorboardX: "),
        ("--wandb pythias", f"--wandb needs the package wandb: {sys.executable} -m pip install"),
    ):
        refused(train_pythia.main, flags(tmp_path, tokens, "a", flag, steps=2), said)
        for package in "tensorboardX", "wandb":
            monkeypatch.setitem(sys.modules, package, None)
