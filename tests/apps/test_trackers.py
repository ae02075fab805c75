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

    def call(*words):
        made.append([*words])

    class Writer:
        def __init__(self, folder, purge_step):
            call("open", os.path.realpath(folder), purge_step)

        def add_scalar(self, name, value, step):
            call("scalar", name, value, step)

        def flush(self):
            call("flush")

        def close(self):
            call("close")

    class Run:
        def __init__(self, project):
            self.project = project

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, line):
            call("log", line)

        def finish(self):
            call("close")
            if self.project == "offline":
                raise RuntimeError("no network")

    def init(project, name, dir, id, resume, config):
        if project == "forbidden":
            raise RuntimeError("not logged in")
        assert resume == "allow" and os.path.isdir(dir)
        call("open", project, name, id, config["steps"])
        return Run(project)

    contents = {"tensorboardX": {"SummaryWriter": Writer}, "wandb": {"init": init}}
    for name, content in contents.items():
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
    argv = flags(tmp_path, tokens, "c", "--tensorboard", "--wandb", "offline", steps=2)
    assert train_pythia.main(argv) == 0 and calls()[-2:] == [["close"], ["close"]]
    said, error = capsys.readouterr()
    assert "needle train: no network\n" in error and "sample (" in said
    argv = flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "forbidden")
    assert train_pythia.main(argv) == 1
    assert "--wandb forbidden: not logged in (WANDB_MODE=offline" in capsys.readouterr().err
    for flag, package in ("--tensorboard", "tensorboardX"), ("--wandb pythias", "wandb"):
        monkeypatch.delitem(sys.modules, package)
        monkeypatch.setattr(sys, "path", [])  # where it may be installed
        assert train_pythia.main(flags(tmp_path, tokens, "b", flag)) == 1
        said = f"{flag.split()[0]} needs the package {package}: {sys.executable} -m pip install"
        assert said in capsys.readouterr().err
        assert train_pythia.main(flags(tmp_path, tokens, "b", steps=1)) == 0  # the name is free
        shutil.rmtree(tmp_path / "runs" / "b")
