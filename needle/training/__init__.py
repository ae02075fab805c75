"""Training: `fit` for a notebook, and the parts of the long runs of apps/train_pythia.py.

loop        fit, the loop of a notebook; GraphedStep: a micro-batch replayed as one CUDA graph
settings    the flags of a run, their help and defaults, and what config.json keeps of them
keep        the steps of --keep
folder      runs/NAME: the free name, the process that owns it, the run to resume
run         Run: its first model, its checkpoints, how to go on with it, its end
session     the surroundings of the loop and of the program: ranks, stop signals, exit codes
log, plot   metrics.jsonl, the progress bar, TensorBoard and W&B; loss.png
replay/     proofs of a run, replays with edits, verdicts, comparisons, banks and suites of runs
saved_run   open_run: a run's folder in Python
evaluate    the loss of any model on any data; lm_eval: a model in the LM evaluation harness
supervise   restarts after faults and hangs, by the heartbeat of a training
peaks       peak rates of GPUs, for the share that a run reaches
"""

from needle.training.loop import GraphedStep, fit, worth_recording
from needle.training.saved_run import SavedRun, open_run

__all__ = ["GraphedStep", "SavedRun", "fit", "open_run", "worth_recording"]
