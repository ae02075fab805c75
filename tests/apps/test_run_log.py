"""What a run shows: the bar of a terminal, the numbers in it, the plot."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios

import numpy as np
import pytest

import needle as ndl
from needle.backend_ndarray import full
from needle.files import Lock
from needle.training import log as logs
from needle.training import plot as plots

pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    """Holds what is written, and has the size of a real terminal."""

    encoding = "utf-8"

    def __init__(self, columns):
        super().__init__()
        self.ends = pty.openpty()
        fcntl.ioctl(self.ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def isatty(self):
        return True

    def fileno(self):
        return self.ends[1]


def shown(tmp_path, monkeypatch, columns, steps, done, speed):
    """The bar's last state on a terminal of so many columns."""
    terminal, now = Terminal(columns), [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", terminal)
    log = logs.RunLog(Lock(tmp_path), ndl.cpu(), 0, steps, speed, 1.0, 1e12)
    for step in range(1, done + 1):
        now[0] += 1.0  # a step a second
        loss = full((), 3.6312, "float32", ndl.cpu())
        log.queue(step, [loss], loss, 1e-3, "", 0.0)
    log.finish()
    log._bar.refresh()
    text = terminal.getvalue()
    log.close()
    for end in terminal.ends:
        os.close(end)
    return text.split("\r")[-1]


@pytest.mark.parametrize(
    "steps, done, speed, begins",
    [
        (246, 144, 17_100, "144/246 loss 3.63 17k tok/s left 1:42 |"),
        (143_000, 9, 1_119_000, "9/143000 loss 3.63 1.1M tok/s left 39:43:11 |"),
    ],
)
def test_the_bar_at_80_columns(tmp_path, monkeypatch, steps, done, speed, begins):
    line = shown(tmp_path, monkeypatch, 80, steps, done, speed)
    assert line.startswith(begins) and len(line) <= 80
    cells = re.fullmatch(r"\|(.*)\|", line[len(begins) - 1 :].strip())[1]
    assert len(cells) >= 15
    assert "█" in cells or done / steps < 1 / len(cells)


class Pipe(io.StringIO):
    """Knows what has gone through."""

    sent = ""

    def flush(self):
        self.sent = self.getvalue()


def test_each_plain_line_is_sent_at_once(tmp_path, monkeypatch):
    pipe, now = Pipe(), [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stdout", pipe)
    log = logs.RunLog(Lock(tmp_path), ndl.cpu(), 0, 2, 100, 1e6, 1e9)
    for step, speed, share in ((1, 100, 10), (2, 50, 5)):
        now[0] += step
        loss = full((), 3.5, "float32", ndl.cpu())
        log.queue(step, [loss], loss, 1e-3, "", 0.0)
        log.finish()
        line = pipe.sent.splitlines()[-1]
        assert line.startswith(f"step {step}/2  loss 3.5000  lr 1.00e-03  norm 3.500")
        assert f"tok/s {speed}  MFU {share}.0%  mem " in line
    log.close()


def test_a_resumed_log_goes_on_where_its_checkpoint_was(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])

    def trained(start, steps):
        log = logs.RunLog(Lock(tmp_path), ndl.cpu(), start, 5, 10, 1.0, None)
        for step in range(start + 1, steps + 1):
            now[0] += step
            loss = full((), 9.0 - step, "float32", ndl.cpu())
            log.queue(step, [loss], loss, 1e-3, "", 0.0)
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


def test_a_full_disk_is_named(tmp_path):
    log = logs.RunLog(Lock(tmp_path), ndl.cpu(), 0, 5, 1, 1.0, None)
    log._file.close()
    log._file = open("/dev/full", "a")
    loss = full((), 3.0, "float32", ndl.cpu())
    log.queue(1, [loss], loss, 1e-3, "", 0.0)
    with pytest.raises(OSError, match="No space left on device: '.*metrics.jsonl'"):
        log.finish()
    log.close()


def test_short_numbers_and_times():
    numbers = [0, 7.4, 950, 1000, 1449, 9960, 17_100, 999_400, 1_119_000, 23_000_000]
    words = "0 7 950 1.0k 1.4k 10.0k 17k 999k 1.1M 23M".split()
    assert [logs.short(n) for n in numbers] == words
    times = [0, 59.4, 59.6, 102, 3599, 3600, 143_000]
    words = "0:00 0:59 1:00 1:42 59:59 1:00:00 39:43:20".split()
    assert [logs.clock(t) for t in times] == words


def test_the_smoothed_line():
    slope = np.linspace(9, 3, 200)
    noise = np.random.RandomState(0).randn(200)
    np.testing.assert_allclose(plots.smoothed(slope)[:190], slope[:190])  # straight stays there
    assert plots.smoothed(noise)[10:-10].std() < 0.5
    assert abs(np.diff(plots.smoothed(noise))[-5:]).max() < 0.5  # no spike at the end
    np.testing.assert_array_equal(plots.smoothed([4.0]), [4.0])


@pytest.mark.parametrize("steps, labels", [(49, ["training"]), (50, ["training, smoothed"])])
def test_the_plot_says_smoothed_where_it_is(tmp_path, monkeypatch, steps, labels):
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    lines = [f'{{"step": {n}, "tokens": {n}, "loss": {n % 7}}}\n' for n in range(1, steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plots.plot(tmp_path)
    axes = pyplot.gcf().axes[0]
    monkeypatch.undo()
    pyplot.close("all")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels
    same = [list(line.get_ydata()) == [n % 7 for n in range(1, steps + 1)] for line in axes.lines]
    assert same == ([True] if steps < 50 else [True, False])


def test_the_plot_has_short_ticks_both_lines_and_points(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib import colors, pyplot

    lines = [
        f'{{"step": {n}, "tokens": {n * 4096}, "loss": {9 - n / 20}'
        + (f', "val_loss": {9 - n / 20}' if n % 50 == 0 else "")
        + "}\n"
        for n in range(1, 101)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    assert plots.plot(tmp_path) == f"plot: {tmp_path / 'loss.png'}"
    axes = pyplot.gcf().axes[0]
    ticks = {tick.get_text() for tick in axes.get_xticklabels()}
    monkeypatch.undo()
    pyplot.close("all")
    assert {"100k", "400k"} <= ticks
    raw, smooth, points = axes.lines
    assert raw.get_alpha() < 0.5 and smooth.get_alpha() is None and points.get_linestyle() == "None"
    assert list(points.get_xdata()) == [50 * 4096, 100 * 4096]
    for line in (smooth, points):  # dark on paper
        assert sum(w * c for w, c in zip((0.3, 0.6, 0.1), colors.to_rgb(line.get_color()))) < 0.35
