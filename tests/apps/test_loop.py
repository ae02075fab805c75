"""The loop of apps/train_pythia.py beside a plain one, update by update.

The plain loop takes its batches from an order written here, and the gradient of a step from one
forward and backward over all rows of its micro-batches, in a model without flat buffers. It clips
and updates in float64 NumPy. Gradients are compared at the weights of the run, and updates start
from the run's gradients: Adam turns the last bit of a gradient near 0 into a whole step.
"""

import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import train_pythia
from harness import DEVICES
from small_runs import flags, lines_of, micro_batches

from needle import CudaError, CudaFatalError, Tensor
from needle.distributed.control import Control
from needle.distributed.environment import Place
from needle.models import Pythia
from needle.processes import HEARTBEAT, collecting
from needle.training import log as logs
from needle.training import session as sessions
from needle.training.session import STOPS, Stop
from needle.training.settings import parse

STEPS, WARMUP, LR, DECAY, BATCH, TIME, EPOCH = 6, 2, 0.01, 0.3, 2, 16, 12


def rate(step):
    if step < WARMUP:
        return LR * step / WARMUP
    return LR - (LR - LR / 10) * (step - WARMUP) / (STEPS - WARMUP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulate, clip", [(1, 0), (1, 0.4), (5, 0), (5, 0.4)])
def test_each_update_is_that_of_a_plain_loop(
    tmp_path, tokens, monkeypatch, device, accumulate, clip
):
    argv = flags(
        tmp_path, tokens, "a", "--schedule linear --seed 5",
        f"--grad-accum {accumulate} --clip {clip} --lr {LR} --warmup {WARMUP}",
        f"--weight-decay {DECAY}", device=device, steps=STEPS,
    )  # fmt: skip
    run = train_pythia.make_run(parse(argv), sessions.Ending())

    def now():
        slots = {n: a.numpy() for n, a in run.optimizer.state_dict()["arrays"].items()}
        return {
            name: (p.numpy(), slots[f"m.{name}"], slots[f"v.{name}"])
            for name, p in run.model.named_parameters()
        }

    states, gradients = [now()], []
    queue = logs.RunLog.queue

    def watched(*args):  # called after each update
        queue(*args)
        states.append(now())
        gradients.append({n: p.grad.numpy() for n, p in run.model.named_parameters()})

    monkeypatch.setattr(logs.RunLog, "queue", watched)
    assert train_pythia.train(run) == 0
    lines = lines_of(tmp_path, "a")
    assert len(lines) == len(gradients) == STEPS

    plain = Pythia(run.model.config, device=run.device)
    batches = micro_batches(5, accumulate * STEPS)
    for step in range(1, STEPS + 1):
        before, after, grads, line = (
            states[step - 1],
            states[step],
            gradients[step - 1],
            lines[step - 1],
        )
        ids, targets = (
            np.concatenate(rows) for rows in zip(*(next(batches) for _ in range(accumulate)))
        )
        for name, parameter in plain.named_parameters():
            parameter.data = Tensor(before[name][0], device=run.device)
            parameter.grad = None
        _, loss = plain(ids, targets)
        loss.backward()
        assert line["loss"] == pytest.approx(loss.numpy().item(), rel=1e-6)
        assert line["lr"] == pytest.approx(rate(step), rel=1e-12)
        assert line["tokens"] == step * ids.size

        square = math.fsum((g.astype(np.float64) ** 2).sum() for g in grads.values())
        norm = math.sqrt(square)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-6)
        scale = min(1, clip / (norm + 1e-6)) if clip else 1
        assert clip == 0 or scale < 0.9  # it bites
        for name, parameter in plain.named_parameters():
            wanted = parameter.grad.numpy()
            assert np.linalg.norm(grads[name] - wanted) <= 1e-5 * norm, (step, name)
            p, m, v = (x.astype(np.float64) for x in before[name])
            g = scale * grads[name].astype(np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            change = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
            decay = DECAY if p.ndim > 1 and not name.endswith("bias") else 0
            p = p - rate(step) * (change + decay * p)
            for got, wanted, atol in zip(after[name], (p, m, v), (1e-7, 1e-8, 1e-12)):
                np.testing.assert_allclose(
                    got, wanted, rtol=2e-6, atol=atol, err_msg=f"{step} {name}"
                )


@pytest.mark.parametrize("often", ["--keep 1,2,...", "--eval-every 1", "--save-every 1"])
def test_speed_of_a_step_counts_neither_evaluating_nor_saving(tmp_path, run, monkeypatch, often):
    """A step takes a second, and each of the others 100."""
    now = [0.0]

    def slow(place, name, seconds):
        do = getattr(place, name)

        def slowed(*args):
            now[0] += seconds
            return do(*args)

        monkeypatch.setattr(place, name, slowed)

    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    slow(logs.RunLog, "queue", 1.0)
    slow(train_pythia, "evaluate", 100.0)
    slow(sessions, "write_checkpoint", 100.0)
    slow(sessions, "write_weights", 100.0)
    assert run("a", often) == 0
    lines = lines_of(tmp_path, "a")
    assert [line["tokens_per_second"] for line in lines] == [BATCH * TIME] * STEPS
    assert [line["seconds"] for line in lines] == [*range(1, STEPS + 1)]


def test_each_batch_of_an_evaluation_is_a_heartbeat(tmp_path, tokens, monkeypatch):
    """Dropout is off in these alone."""
    run, beats = train_pythia.make_run(parse(flags(tmp_path, tokens, "a")), sessions.Ending()), []
    run.data.held_out = run.data.train
    monkeypatch.setattr(sessions, "beat", lambda: beats.append(run.model.training))
    assert sessions.evaluate(run)["val_loss"] > 0
    assert beats == [False] * EPOCH and run.model.training
    monkeypatch.setitem(sessions.EVAL_TOKENS, "cpu", 3 * BATCH * TIME)
    for most in 3, 2:  # by the tokens, then by the batches
        beats.clear()
        assert sessions.evaluate(run) and len(beats) == most
        monkeypatch.setattr(sessions, "EVAL_BATCHES", 2)
    monkeypatch.setitem(sessions.EVAL_TOKENS, "cpu", 1)  # fewer than a batch has
    assert sessions.evaluate(run)["val_loss"] > 0
    length = run.settings.seq_len
    for sequences, found in (1, False), (2, True):  # the last of them lacks a target
        run.data.held_out = run.data.train.between(0, sequences * length)
        assert bool(sessions.evaluate(run)) is found


def test_rank_0_alone_prints_and_has_the_heartbeat(monkeypatch, capsys):
    monkeypatch.setattr(sessions.Control, "join", lambda place, facts: Control(place, {}, 60.0))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # as it is after the test
    for rank, told in (0, ("steps", "here\n")), (1, (None, "")):
        monkeypatch.setenv(HEARTBEAT, "steps")
        place = Place(rank, 2, rank, 2, "needle")
        assert sessions.join(parse([]), [], place, Path(__file__)).rank == rank
        print("here")
        assert (os.environ.get(HEARTBEAT), capsys.readouterr().out) == told
    sys.stdout.close()  # of rank 1


def test_errors_have_their_words_and_exit_codes():
    for error, said, code in (
        (CudaFatalError("x"), "the GPU is lost: x\nstart again with --resume auto", 75),
        (CudaError("x"), "x\n(where memory ran out: --recompute, or a smaller", 1),
        (MemoryError(), "out of memory\n(where memory ran out", 1),
        (KeyboardInterrupt(), "interrupted", 130),
    ):
        text, found = sessions.outcome(error)
        assert text.startswith(said) and found == code
    assert sessions.outcome(BrokenPipeError()) is sessions.outcome(TypeError()) is None
    for error, code in (SystemExit(2), 2), (TypeError(), 1):
        with pytest.raises(type(error)), sessions.Ending() as ending:
            raise error
        assert ending.code == code


def test_source_of_ranks_is_the_program_the_package_and_its_core(tmp_path, monkeypatch):
    names = "train.py", "needle/training/session.py", "needle/models.py", "needle/_C.so"
    program, session, *_ = files = [tmp_path / name for name in names]
    session.parent.mkdir(parents=True)
    for file in files:
        file.write_text("one")
    monkeypatch.setattr(sessions, "__file__", str(session))
    told = {sessions.source_digest(program)}
    for file in files:
        file.write_text("other")
        told.add(sessions.source_digest(program))
    assert len(told) == 5


def test_hangup_is_collected_unless_it_was_ignored_and_a_second_sigint_interrupts(heeds_signals):
    for before, wanted in (signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, []):
        signal.signal(signal.SIGHUP, before)
        stop = Stop()
        with collecting(stop, *STOPS):
            signal.raise_signal(signal.SIGHUP)
            assert stop == wanted
        assert signal.getsignal(signal.SIGHUP) == before
    with collecting(stop, *STOPS):
        signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
