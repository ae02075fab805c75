"""TensorBoard and Weights & Biases, by packages that record their calls."""

import importlib.machinery
import os
import shutil
import sys
import types

import pytest
import train_pythia
from small_runs import flags, lines_of, run_until


@pytest.fixture
def calls(monkeypatch):
    """Packages that record the calls of needle/training/trackers.py hide real ones; calls() ->
    those since the last call."""
    made = []
    note = lambda *words: made.append([*words])

    class Writer:
        def __init__(self, folder, purge_step):
            note("open", os.path.realpath(folder), purge_step)

        add_scalar = staticmethod(lambda *scalar: note("scalar", *scalar))
        flush = staticmethod(lambda: note("flush"))
        close = staticmethod(lambda: note("close"))

    class Run:
        def __init__(self, project, name, dir, id, resume, config):
            if project == "forbidden":
                raise RuntimeError("not logged in")
            assert resume == "allow" and os.path.isdir(dir)
            note("open", project, name, id, config["steps"])
            self.project = project

        log = staticmethod(lambda line: note("log", line))

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def finish(self):
            note("close")
            if self.project == "offline":
                raise RuntimeError("no network")

    for name, content in ("tensorboardX", {"SummaryWriter": Writer}), ("wandb", {"init": Run}):
        module = types.ModuleType(name)
        vars(module).update(content, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)

    def read():
        since = made[:]
        made.clear()
        return since

    return read


def test_trackers_get_each_line_through_a_kill(tmp_path, tokens, monkeypatch, calls):
    argv = flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "pythias")
    run_until(monkeypatch, 5, argv)
    first = calls()
    folder = str(tmp_path / "runs" / "a" / "tensorboard")
    assert first[0] == ["open", folder, 1] and first[-2:] == [["close"], ["close"]]
    assert first[1][:3] == ["open", "pythias", "a"]
    assert first.count(["flush"]) == 2  # with each checkpoint
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    second = calls()
    assert second[0] == ["open", folder, 5]  # TensorBoard drops step 5 of the first part
    assert second[1] == first[1]  # under the same id
    scalars = [call[1:] for call in first + second if call[0] == "scalar"]
    assert scalars == [
        [name, value, line["step"]]
        for line in lines_of(tmp_path, "a")
        for name, value in line.items()
        if name != "step"
    ]
    assert [call[1] for call in first + second if call[0] == "log"] == lines_of(tmp_path, "a")
    assert train_pythia.main(flags(tmp_path, tokens, "b", "--wandb", "pythias", steps=1)) == 0
    assert calls()[0][3] != first[1][3]


def test_tracker_that_cannot_be_used_or_ended_says_why(
    tmp_path, tokens, monkeypatch, calls, capsys
):
    def ended(code, *more):
        assert train_pythia.main(flags(tmp_path, tokens, "a", *more, steps=2)) == code
        shutil.rmtree(tmp_path / "runs" / "a", ignore_errors=True)
        return capsys.readouterr().err

    assert "needle train: no network\n" in ended(0, "--tensorboard --wandb offline")
    said = "--wandb forbidden: not logged in (WANDB_MODE=offline"
    assert said in ended(1, "--tensorboard --wandb forbidden")
    monkeypatch.setattr(sys, "path", [])  # where they may be installed
    for flag, package in ("--tensorboard", "tensorboardX"), ("--wandb pythias", "wandb"):
        monkeypatch.delitem(sys.modules, package)
        said = f"{flag.split()[0]} needs the package {package}: {sys.executable} -m pip install"
        assert said in ended(1, flag)
