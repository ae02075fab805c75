"""How many steps `make train` takes where no flag says."""

import numpy as np
import pytest
import train_pythia
from small_runs import arguments, flags, lines_of, numbers_of, run_until, tensors_of

import needle as ndl
from needle.checkpoint import Checkpoint, list_checkpoints
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
    """Flags that say nothing of the length."""
    argv = flags(tmp_path, tokens, name, *more)
    at = argv.index("--steps")
    return argv[:at] + argv[at + 2 :]


def test_steps_that_fit_three_minutes():
    assert lengths.fitting_steps(0.01) == lengths.fitting_steps(0.25) == 600
    assert lengths.fitting_steps(0.36) == 400
    assert lengths.fitting_steps(0.5) == lengths.fitting_steps(60.0) == 300
    for seconds in np.linspace(0.25, 0.5, 50):
        steps = lengths.fitting_steps(seconds)
        assert 300 <= steps <= 600 and steps % 50 == 0 and 120 <= steps * seconds <= 150


def test_measuring_draws_no_number(short):
    settings = run_settings.complete({"batch_size": 2, "seq_len": 16}, None, on_gpu=False)
    np.random.seed(3)
    before = np.random.get_state()
    config = train_pythia.model_config(settings)
    assert lengths.seconds_of_step(config, settings, ndl.cpu()) > 0
    assert all(np.array_equal(a, b) for a, b in zip(before, np.random.get_state()))


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
        assert run_settings.may_choose_steps(named, tokens, settings) is chosen


@pytest.mark.parametrize(
    "more, said",
    [
        ("--data nowhere", "nowhere: no such file or folder"),
        ("--tokenizer nowhere", "nowhere: no such tokenizer file"),
        ("--batch-size 400", "fewer than one batch of 400 x 16"),
    ],
)
def test_data_is_looked_at_before_anything_is_measured(
    tmp_path, tokens, short, monkeypatch, capsys, more, said
):
    monkeypatch.setattr(lengths, "seconds_of_step", None)
    assert train_pythia.main(open_ended(tmp_path, tokens, "a", more)) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds, steps", [(1000.0, 2), (37.0, 4), (0.001, 6)])
def test_the_measurement_changes_the_length_and_nothing_else(
    tmp_path, tokens, short, monkeypatch, capsys, seconds, steps
):
    measure, measured = lengths.seconds_of_step, []

    def pretended(*arguments):
        measured.append(measure(*arguments))
        return seconds

    monkeypatch.setattr(lengths, "seconds_of_step", pretended)
    np.random.seed(5)
    assert train_pythia.main(open_ended(tmp_path, tokens, "open")) == 0
    assert f"{steps} steps, about" in capsys.readouterr().out
    assert len(measured) == 1 and measured[0] > 0
    np.random.seed(6)
    assert train_pythia.main(flags(tmp_path, tokens, "named", steps=steps)) == 0
    assert len(measured) == 1 and "steps, about" not in capsys.readouterr().out
    assert numbers_of(tmp_path, "open") == numbers_of(tmp_path, "named")
    assert len(lines_of(tmp_path, "open")) == steps
    ends = [list_checkpoints(tmp_path / "runs" / n / "checkpoints")[0] for n in ("open", "named")]
    assert tensors_of(ends[0]) == tensors_of(ends[1])
    states = [Checkpoint(path).state for path in ends]
    assert states[0]["settings"] == states[1]["settings"]
    assert states[0]["settings"]["steps"] == steps
    assert states[0]["random_state"] == states[1]["random_state"]


def test_a_resumed_run_keeps_its_number_of_steps(tmp_path, tokens, short, monkeypatch):
    monkeypatch.setattr(lengths, "seconds_of_step", lambda *_: 37.0)
    argv = open_ended(tmp_path, tokens, "a")
    run_until(monkeypatch, 3, argv)
    monkeypatch.setattr(lengths, "seconds_of_step", None)  # nothing is measured again
    assert train_pythia.main([*argv, *arguments("--resume auto")]) == 0
    assert len(lines_of(tmp_path, "a")) == 4
