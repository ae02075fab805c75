"""The number of steps of `make train`, which no flag gives."""

import numpy as np
import pytest
import train_pythia
from small_runs import arguments, assert_same_run, checkpoint_of, flags, run_until, without

from needle.checkpoint import Checkpoint
from needle.training import length as lengths
from needle.training import settings as run_settings


@pytest.fixture
def short(monkeypatch):
    """Two to six steps."""
    monkeypatch.setattr(lengths, "LEAST", 2)
    monkeypatch.setattr(lengths, "MOST", 6)
    monkeypatch.setattr(lengths, "UNIT", 1)
    monkeypatch.setattr(lengths, "MEASURED", 0.0)
    monkeypatch.setitem(run_settings.DEFAULTS, "steps", (100, 300, 6))


def open_ended(tmp_path, tokens, name, *more):
    """Flags that do not give the length."""
    return without(flags(tmp_path, tokens, name, *more), "--steps")


def test_steps_fit_three_minutes():
    assert lengths.fitting_steps(0.01) == lengths.fitting_steps(0.25) == 600
    assert lengths.fitting_steps(0.36) == 400
    assert lengths.fitting_steps(0.5) == lengths.fitting_steps(60.0) == 300
    for seconds in np.linspace(0.25, 0.5, 50):
        steps = lengths.fitting_steps(seconds)
        assert 300 <= steps <= 600 and steps % 50 == 0 and 120 <= steps * seconds <= 150


def test_only_an_open_length_of_tiny_is_chosen():
    for named, tokens, chosen in [
        ({}, None, True),
        ({"batch_size": 8}, None, True),
        ({"steps": 7}, None, False),
        ({}, 9999, False),
        ({"recipe": "pythia", "model": "tiny"}, None, False),
        ({"model": "pythia-14m"}, None, False),
    ]:
        settings = {"model": "tiny", **named}
        assert run_settings.may_choose_steps(named, tokens, settings) is chosen, named


def test_data_are_checked_before_a_step_is_measured(tmp_path, tokens, short, monkeypatch, capsys):
    monkeypatch.setattr(lengths, "seconds_of_step", None)
    for more, said in [
        ("--data nowhere", "nowhere: no such file or folder"),
        ("--tokenizer nowhere", "nowhere: no such tokenizer file"),
        ("--batch-size 400", "fewer than one batch of 400 x 16"),
    ]:
        assert train_pythia.main(open_ended(tmp_path, tokens, "a", more)) == 1
        assert said in capsys.readouterr().err, more


def test_run_of_chosen_length_equals_one_of_named_length(
    tmp_path, tokens, short, monkeypatch, capsys
):
    """The seed is set after measuring; a resumed run measures nothing again."""
    measured, seconds_of_step = [], lengths.seconds_of_step

    def measuring(*args):
        measured.append(seconds_of_step(*args))
        return 37.0  # seconds: 4 steps

    monkeypatch.setattr(lengths, "seconds_of_step", measuring)
    np.random.seed(5)
    argv = open_ended(tmp_path, tokens, "open")
    run_until(monkeypatch, 3, argv)
    assert "4 steps of " in capsys.readouterr().out and measured[0] > 0
    assert train_pythia.main([*argv, *arguments("--resume auto")]) == 0
    np.random.seed(6)
    assert train_pythia.main(flags(tmp_path, tokens, "named", steps=4)) == 0
    assert len(measured) == 1 and "steps, about" not in capsys.readouterr().out
    assert_same_run(tmp_path, "open", "named", 4)
    states = [Checkpoint(checkpoint_of(tmp_path, name, 4)).state for name in ("open", "named")]
    assert states[0]["settings"] == states[1]["settings"] and states[0]["settings"]["steps"] == 4
    assert states[0]["random_state"] == states[1]["random_state"]
