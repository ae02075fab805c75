"""The log of a run: the bar of a terminal, the numbers in it, metrics.jsonl, the plot."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import sys
import termios

import numpy as np
import pytest
from harness import naming

import needle as ndl
from needle.backend_ndarray import full
from needle.files import Lock
from needle.training import log as logs
from needle.training import plot as plots

pytest.importorskip("tqdm")


@pytest.fixture
def now(monkeypatch):
    """The clock of the log, a list of one number of seconds."""
    seconds = [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: seconds[0])
    return seconds


def queue(log, step, loss):
    loss = full((), loss, "float32", ndl.cpu())
    log.queue(step, [loss], loss, 1e-3, "")


class Terminal(io.StringIO):
    """Holds the output, and has the size of a real terminal."""

    encoding = "utf-8"

    def __init__(self, columns):
        super().__init__()
        self.ends = pty.openpty()
        fcntl.ioctl(self.ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def isatty(self):
        return True

    def fileno(self):
        return self.ends[1]


@pytest.mark.parametrize(
    "steps, done, speed, begins",
    [
        (246, 144, 17_100, "144/246 loss 3.63 17k tok/s left 1:42 |"),
        (143_000, 9, 1_119_000, "9/143000 loss 3.63 1.1M tok/s left 39:43:11 |"),
    ],
)
def test_bar_fits_80_columns(tmp_path, monkeypatch, now, steps, done, speed, begins):
    terminal = Terminal(80)
    monkeypatch.setattr(sys, "stderr", terminal)
    log = logs.RunLog(Lock(tmp_path), ndl.cpu(), 0, steps, speed, 1.0, 1e12)
    for step in range(1, done + 1):
        now[0] += 1.0  # a step a second
        queue(log, step, 3.6312)
    log.finish()
    log._bar.refresh()
    line = terminal.getvalue().split("\r")[-1]
    log.close()
    for end in terminal.ends:
        os.close(end)
    assert line.startswith(begins) and len(line) <= 80
    cells = re.fullmatch(r"\|(.*)\|", line[len(begins) - 1 :].strip())[1]
    assert len(cells) >= 15
    assert "█" in cells or done / steps < 1 / len(cells)


def test_plain_lines_are_flushed_one_by_one_and_fit_80_columns(tmp_path, monkeypatch, now):
    class Pipe(io.StringIO):
        sent = ""

        def flush(self):
            self.sent = self.getvalue()

    for steps, done, seconds, tokens, norm, flops, speed, mfu, left in (
        (600, 50, 0.25, 4096, 1.234, 1e9, "16k", "2%", "2:18"),
        (143_000, 1000, 1, 1 << 20, 3.5e8, 1e9, "1.0M", "105%", "39:26:40"),
        (143_000, 100_000, 10, 1 << 20, 3.5, 1e9, "105k", "10%", "119:26:40"),
    ):
        pipe = Pipe()
        monkeypatch.setattr(sys, "stdout", pipe)
        (tmp_path / str(done)).mkdir()
        lock = Lock(tmp_path / str(done))
        log = logs.RunLog(lock, ndl.cpu(), done - 1, steps, tokens, flops, 1e15)
        monkeypatch.setattr(logs, "PLAIN_LINES", steps)
        monkeypatch.setattr(log, "_memory", lambda: 70.12 * 2**30)
        now[0] += seconds
        loss = full((), 10.8251, "float32", ndl.cpu())
        log.queue(done, [loss], full((), norm, "float32", ndl.cpu()), 1e-3, "")
        log.finish(val_loss=10.5, val_bits_per_byte=2.25)
        line, held_out = pipe.sent.splitlines()
        assert max(len(line), len(held_out)) <= 80 and "10.5000, 2.2500 bits" in held_out
        for fact in (
            f"step {done}/{steps}", "loss 10.8251", "lr 1.0e-03", f" {speed} tok/s", f"MFU {mfu} ",
            " 70", f"left {left}",
        ):  # fmt: skip
            assert fact in line, line
        log.close()


def write_metrics(folder, losses, tokens, every, end=""):
    """metrics.jsonl of a step each; one in `every` is evaluated."""
    lines = [{"step": n, "tokens": n * tokens, "loss": x} for n, x in enumerate(losses, 1)]
    for line in lines[every - 1 :: every]:
        line["val_loss"] = line["loss"]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(text + end)


def test_figure_of_several_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    curves = {"a": np.linspace(9, 3, 60), "b": np.linspace(8, 4, 7), "c/a": np.linspace(7, 5, 9)}
    for name, losses in curves.items():
        write_metrics(tmp_path / name, losses, 32, 3, '{"step": 99, "los')
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        assert plots.main(["a", "b", "c/a", "--out", "two.svg"]) == 0
        axes = pyplot.gcf().axes[0]
    pyplot.close("all")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b", "c/a"]
    drawn = [line.get_ydata() for line in axes.lines]
    for losses in curves.values():
        smooth = plots.smoothed(losses)
        assert any(len(y) == len(losses) and np.allclose(y, smooth) for y in drawn)
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
    assert [list(x[:2]) for x in dots] == [[96, 192]] * 3
    assert (tmp_path / "two.svg").read_text().startswith("<?xml")
    assert plots.main(["a", "b"]) == 0 and (tmp_path / "loss.png").exists()
    assert plots.main(["b"]) == 0 and (tmp_path / "b" / "loss.png").exists()
    capsys.readouterr()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").touch()
    for words, code, said in (
        (["no"], 1, "no: no such folder\n"),
        (["new"], 1, "new: no step yet\n"),
        (["."], 1, ".: no step yet, or not a run\n"),
        ([""], 2, "an empty name ('') of a file or folder: the current folder is '.'\n"),
        (["a", "--out", ""], 2, "('') of a file or folder: the current folder is '.'\n"),
    ):
        with naming(words):
            if code == 1:
                assert plots.main(words) == 1
            else:
                with pytest.raises(SystemExit, match="2"):
                    plots.main(words)
            assert capsys.readouterr().err.endswith(said)


def test_resumed_log_continues_at_its_checkpoint(tmp_path, now):
    def trained(start, steps):
        log = logs.RunLog(Lock(tmp_path), ndl.cpu(), start, 5, 10, 1.0, None)
        for step in range(start + 1, steps + 1):
            now[0] += step
            queue(log, step, 9.0 - step)
            log.finish()
        log.close()
        return log.first_loss, log.seconds

    assert trained(0, 4) == (8.0, 10.0)
    now[0] += 100  # between the two; steps 3 and 4 were not saved
    assert trained(2, 5) == (8.0, 15.0)
    lines = logs.read_lines(tmp_path / "metrics.jsonl")
    wanted = [(1, 10, 8.0, 1.0), (2, 20, 7.0, 3.0), (3, 30, 6.0, 6.0), (4, 40, 5.0, 10.0)]
    got = [tuple(line[key] for key in ("step", "tokens", "loss", "seconds")) for line in lines]
    assert got == [*wanted, (5, 50, 4.0, 15.0)]


STEP = {"step": 2, "tokens": 64, "loss": 8.0}
DAMAGED = [
    b"",
    b"{half",
    b"\xff\xfe",
    b"\x00",
    b"[]",
    b"3",
    b"null",
    b"[" * 100_000,
    b'{"loss": 1.5}',
]
DAMAGED += [
    json.dumps(STEP | {name: value}).encode()
    for name in (*STEP, "val_loss", "lr")
    for value in ("x", None, [1], {}, True, 10**400)
]
DAMAGED += [b'{"step": 1.5, "tokens": 64, "loss": 8.0}', b'{"step": 2, "tokens": 1e3, "loss": 8.0}']


def test_damaged_lines_are_left_out_by_every_reader(tmp_path, now):
    pytest.importorskip("matplotlib")
    (tmp_path / "config.json").write_text("{}")
    first, second = b'{"step": 1, "tokens": 32, "loss": 9.0}', json.dumps(STEP).encode()
    for damage in DAMAGED:
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, damage, second, damage]))
        with naming(damage[:60]):
            run = ndl.open_run(tmp_path).metrics
            assert [run["step"].tolist(), run["loss"].tolist()] == [[1, 2], [9.0, 8.0]]
            log = logs.RunLog(Lock(tmp_path), ndl.cpu(), 2, 5, 32, 1.0, None)
            log.close()
            assert (tmp_path / "metrics.jsonl").read_bytes() == first + b"\n" + second + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, *DAMAGED, second]))
    assert plots.main([str(tmp_path)]) == 0
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(DAMAGED))
    assert plots.main([str(tmp_path)]) == 1 and plots.plot(tmp_path).startswith("no loss.png: noth")


def test_short_numbers_and_times():
    numbers = [0, 7.4, 950, 1000, 1449, 9960, 17_100, 999_400, 1_119_000, 23_000_000]
    words = "0 7 950 1.0k 1.4k 10.0k 17k 999k 1.1M 23M".split()
    assert [logs.short(n) for n in numbers] == words
    times = [0, 59.4, 59.6, 102, 3599, 3600, 143_000]
    words = "0:00 0:59 1:00 1:42 59:59 1:00:00 39:43:20".split()
    assert [logs.clock(t) for t in times] == words


def test_smoothed_line_has_no_spike_at_its_ends():
    slope = np.linspace(9, 3, 200)
    noise = np.random.RandomState(0).randn(200)
    np.testing.assert_allclose(plots.smoothed(slope)[:190], slope[:190])  # straight stays there
    assert plots.smoothed(noise)[10:-10].std() < 0.5
    assert abs(np.diff(plots.smoothed(noise))[-5:]).max() < 0.5
    np.testing.assert_array_equal(plots.smoothed([4.0]), [4.0])


@pytest.mark.parametrize("steps", [49, 50])
def test_plot_of_a_run_has_its_name_short_ticks_and_a_smoothed_line(tmp_path, monkeypatch, steps):
    """$ in a name begins no formula, of which this is none."""
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    losses, folder = [9 - n / 20 + n % 3 for n in range(1, steps + 1)], tmp_path / "a$b_{$"
    write_metrics(folder, losses, 4096, 25)
    with monkeypatch.context() as patch:
        patch.setattr(pyplot, "close", lambda figure: None)
        assert plots.plot(folder) == f"plot: {folder / 'loss.png'}"
        axes = pyplot.gcf().axes[0]
        ticks = {tick.get_text() for tick in axes.get_xticklabels()}
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
    pyplot.close("all")
    assert {"100k", "200k"} <= ticks and axes.get_title() == folder.name
    *training, points = axes.lines
    assert list(points.get_xdata()) == [n * 4096 for n in (25, 50) if n <= steps]
    np.testing.assert_allclose(training[0].get_ydata(), losses)
    if steps == 49:
        assert labels == ["training", "held out"] and len(training) == 1
        return
    assert labels == ["training, smoothed", "held out"]
    raw, smooth = training
    assert raw.get_alpha() < 0.5 and smooth.get_alpha() is None and points.get_linestyle() == "None"
    assert not np.allclose(smooth.get_ydata(), losses)
