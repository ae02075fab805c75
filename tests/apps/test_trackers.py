"""TensorBoard and Weights & Biases, by packages that write down the calls made of them."""

import json
import sys
from types import SimpleNamespace

import pytest
import train_pythia
from small_runs import flags, lines_of, run_until

from needle.distributed.group import Group
from needle.training import run as run_parts
from needle.training import trackers

# Packages with the calls that apps/trackers.py makes of the real ones; each call becomes a line of
# the file $CALLS.
SPY = """
import json, os

def call(name, *values):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, *values]) + "\\n")
"""
FAKES = {
    "tensorboardX/__init__.py": SPY
    + """
class SummaryWriter:
    def __init__(self, folder, purge_step):
        call("open", os.path.realpath(folder), purge_step)
    def add_scalar(self, name, value, step):
        call("scalar", name, value, step)
    def flush(self):
        call("flush")
    def close(self):
        call("close")
""",
    "tensorboard/__init__.py": "",
    "tensorboard/compat/__init__.py": "",
    "tensorboard/compat/proto/__init__.py": "",
    "tensorboard/compat/proto/event_pb2.py": """
class Event(dict):
    def __init__(self, wall_time, **fields):
        super().__init__(fields)
class SessionLog(dict):
    START = "start"
""",
    "tensorboard/compat/proto/summary_pb2.py": """
class Summary(dict):
    Value = dict
""",
    "tensorboard/summary/__init__.py": "",
    "tensorboard/summary/writer/__init__.py": "",
    "tensorboard/summary/writer/event_file_writer.py": SPY
    + """
class EventFileWriter:
    def __init__(self, folder):
        self.folder = folder
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
""",
    "wandb/__init__.py": SPY
    + """
class Run:
    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")
    def log(self, line):
        call("log", line)
    def finish(self):
        call("close")

def init(project, name, dir, id, resume, config):
    if project == "forbidden":
        raise RuntimeError("not logged in")
    assert resume == "allow" and os.path.isdir(dir)
    call("open", project, name, id, config["steps"])
    return Run()
""",
}


@pytest.fixture
def fake_trackers(tmp_path, monkeypatch):
    """The folder that calls are written to; the fake packages hide real ones."""
    for name, text in FAKES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in list(sys.modules):
        if name.split(".")[0] in ("tensorboard", "tensorboardX", "wandb"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    yield tmp_path / "calls"
    for name in list(sys.modules):
        if name.split(".")[0] in ("tensorboard", "tensorboardX", "wandb"):
            del sys.modules[name]


def calls_in(path):
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return calls


@pytest.mark.parametrize("package", ["tensorboard", "tensorboardX"])
def test_tensorboard_gets_each_line(tmp_path, tokens, monkeypatch, fake_trackers, package):
    monkeypatch.setattr(
        trackers,
        "TENSORBOARD",
        ("tensorboard" if package == "tensorboard" else "absent_package", package),
    )
    argv = flags(tmp_path, tokens, "a", "--tensorboard")
    run_until(monkeypatch, 5, argv)
    first = calls_in(fake_trackers)
    folder = str(tmp_path / "runs" / "a" / "tensorboard")
    assert first[0] == ["open", folder, 1] and first[-1] == ["close"]
    assert first.count(["flush"]) == 2  # with each checkpoint
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    second = calls_in(fake_trackers)
    assert second[0] == ["open", folder, 5]  # TensorBoard drops what was written of step 5 on
    scalars = [call[1:] for call in first + second if call[0] == "scalar"]
    assert scalars == [
        [name, value, line["step"]]
        for line in lines_of(tmp_path, "a")
        for name, value in line.items()
        if name != "step"
    ]


def test_wandb_gets_each_line_under_one_id(tmp_path, tokens, monkeypatch, fake_trackers):
    argv = flags(tmp_path, tokens, "a", "--wandb", "pythias")
    run_until(monkeypatch, 5, argv)
    first = calls_in(fake_trackers)
    assert train_pythia.main(argv + ["--resume", "auto"]) == 0
    second = calls_in(fake_trackers)
    assert first[0] == second[0] and first[0][:3] == ["open", "pythias", "a"]
    assert first[-1] == second[-1] == ["close"]
    assert [call[1] for call in first + second if call[0] == "log"] == lines_of(tmp_path, "a")
    assert train_pythia.main(flags(tmp_path, tokens, "b", "--wandb", "pythias")) == 0
    assert calls_in(fake_trackers)[0][3] != first[0][3]


def test_a_tracker_that_refuses(tmp_path, tokens, fake_trackers, capsys):
    argv = flags(tmp_path, tokens, "a", "--tensorboard", "--wandb", "forbidden")
    assert train_pythia.main(argv) == 1
    assert "--wandb forbidden: not logged in (WANDB_MODE=offline" in capsys.readouterr().err
    assert calls_in(fake_trackers)[-1] == ["close"]  # TensorBoard's


@pytest.mark.parametrize(
    "more, said",
    [
        (
            ["--tensorboard"],
            "--tensorboard needs the package tensorboard or tensorboardX: "
            f"{sys.executable} -m pip install",
        ),
        (
            ["--wandb", "pythias"],
            f"--wandb needs the package wandb: {sys.executable} -m pip install wandb",
        ),
    ],
)
def test_a_tracker_that_is_not_installed(tmp_path, tokens, monkeypatch, capsys, more, said):
    monkeypatch.setattr(trackers, "_installed", lambda package: False)
    assert train_pythia.main(flags(tmp_path, tokens, "a", *more)) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()  # before anything began


def test_the_command_to_go_on_names_the_trackers(tmp_path):
    run = run_parts.Run(tmp_path / "a", *[None] * 11, tensorboard=True, wandb="p q")
    run.parallel, run.model = SimpleNamespace(group=Group()), SimpleNamespace(recompute=False)
    run.data = SimpleNamespace(trusted=True)
    assert run_parts.resume_command(run).endswith("--tensorboard --trust-data --wandb 'p q'")
