"""TensorBoard and Weights & Biases, by packages that record their calls."""

import importlib.machinery
import os
import sys
import types

import pytest
import train_pythia
from small_runs import flags, lines_of, run_until

from needle.training import trackers


@pytest.fixture
def calls(monkeypatch):
    """Packages with the calls that needle/training/trackers.py makes hide real ones; calls() ->
    those since the last call."""
    made = []

    def call(*words):
        made.append([*words])

    class Writer:
        """tensorboardX's, which takes numbers; and tensorboard's, which takes events."""

        def __init__(self, folder, purge_step=None):
            self.folder = folder
            if purge_step is not None:
                call("open", os.path.realpath(folder), purge_step)

        def add_scalar(self, name, value, step):
            call("scalar", name, value, step)

        def add_event(self, event):
            if "session_log" in event:
                assert event["session_log"] == {"status": "start"}
                call("open", os.path.realpath(self.folder), event["step"])
            else:
                [value] = event["summary"]["value"]
                call("scalar", value["tag"], value["simple_value"], event["step"])

        def flush(self):
            call("flush")

        def close(self):
            call("close")

    class SessionLog(dict):
        START = "start"

    class Summary(dict):
        Value = dict

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

    proto = "tensorboard.compat.proto"
    event = {"Event": lambda wall_time, **fields: fields, "SessionLog": SessionLog}
    for name, content in {
        "tensorboard": {},
        f"{proto}.event_pb2": event,
        f"{proto}.summary_pb2": {"Summary": Summary},
        "tensorboard.summary.writer.event_file_writer": {"EventFileWriter": Writer},
        "tensorboardX": {"SummaryWriter": Writer},
        "wandb": {"init": init},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)

    def read():
        since = made[:]
        made.clear()
        return since

    return read


@pytest.mark.parametrize("package", ["tensorboard", "tensorboardX"])
def test_trackers_get_each_line_through_a_kill(tmp_path, tokens, monkeypatch, calls, package):
    names = (package if package == "tensorboard" else "absent_package", package)
    monkeypatch.setattr(trackers, "TENSORBOARD", names)
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


def test_tracker_that_cannot_end_is_reported(tmp_path, tokens, calls, capsys):
    argv = flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "offline", steps=2)
    assert train_pythia.main(argv) == 0 and calls()[-2:] == [["close"], ["close"]]
    said, error = capsys.readouterr()
    assert "needle train: no network\n" in error and "sample (" in said


def test_tracker_that_cannot_be_used_says_why(tmp_path, tokens, monkeypatch, calls, capsys):
    argv = flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "forbidden")
    assert train_pythia.main(argv) == 1
    assert "--wandb forbidden: not logged in (WANDB_MODE=offline" in capsys.readouterr().err
    assert calls()[-1] == ["close"]  # TensorBoard's
    monkeypatch.setattr(trackers, "_installed", lambda package: False)
    install = f": {sys.executable} -m pip install"
    for words, said in [
        ("--tensorboard", "--tensorboard needs the package tensorboard or tensorboardX" + install),
        ("--wandb pythias", "--wandb needs the package wandb" + install),
    ]:
        assert train_pythia.main(flags(tmp_path, tokens, "b", words)) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "runs" / "b").exists()  # before anything began
