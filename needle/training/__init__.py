"""Training: `fit` for a notebook, and the parts of the long runs of apps/train_pythia.py.

notebook        fit, the loop of a notebook; saved: open_run, a run's folder in Python
graphed         GraphedStep: a micro-batch replayed as one CUDA graph
settings        the flags of a run, their help and defaults, and what config.json keeps of them
recipes         how the published Pythias were trained; which steps --keep keeps
config          the configuration of a model in a file
start           the model that a run starts with: of a shape, or of weights
run             Run, its checkpoints, and how to go on with it
session         the surroundings of the loop and of the program: log, stop signals, exit codes
heartbeat       the file in which a supervisor sees the life of a training
supervise       restarts after faults and hangs
folder          runs/NAME: the free name, the process that owns it, the checkpoint to resume
log, plot       metrics.jsonl, the progress bar, loss.png; trackers: TensorBoard and W&B
held_out        the loss on held-out data; evaluate: that of any model on any data
lm_eval         a model in the LM evaluation harness
ranks           the processes of a run, their devices, their agreement
peaks           peak rates of GPUs, for the share that a run reaches
"""

from needle.training.graphed import GraphedStep, worth_recording
from needle.training.notebook import fit
from needle.training.saved import SavedRun, open_run

__all__ = ["GraphedStep", "SavedRun", "fit", "open_run", "worth_recording"]
