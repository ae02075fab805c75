"""TensorBoard and Weights & Biases, by packages that record their calls."""

import os
import sys
import types

import pytest
import train_pythia
from small_runs import flags, lines_of, run_until


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


def test_tracker_that_cannot_be_used_says_why(tmp_path, tokens, monkeypatch, calls, capsys):
    for flag, said in (
        ("--wandb forbidden", "--wandb forbidden: not logged in (WANDB_MODE=offline"),
        ("--tensorboard", "--tensorboard needs the package tensorboardX: "),
        ("--wandb pythias", f"--wandb needs the package wandb: {sys.executable} -m pip install"),
    ):
        assert train_pythia.main(flags(tmp_path, tokens, "a", flag, steps=2)) == 1
        assert said in capsys.readouterr().err
        for package in "tensorboardX", "wandb":
            monkeypatch.setitem(sys.modules, package, None)
