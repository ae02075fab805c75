"""Training: `fit` for a notebook, and the parts of the long runs of apps/train_pythia.py.

notebook        fit, the loop of a notebook; saved: open_run, a run's folder in Python
graphed         GraphedStep: a micro-batch replayed as one CUDA graph
settings        the flags of a run, their help and defaults, and what config.json keeps of them
recipes         how the published Pythias were trained; which steps --keep keeps
start           the model that a run starts with: of a shape, or of weights
run             Run, its checkpoints, and how to go on with it
session         the surroundings of the loop and of the program: log, stop signals, exit codes
folder          runs/NAME: the free name, the process that owns it, the checkpoint to resume
log, plot       metrics.jsonl, the progress bar, loss.png; trackers: TensorBoard and W&B
evaluation      the loss on held-out data
ranks           the processes of a run, their devices, their agreement
"""

from needle.training.graphed import GraphedStep, worth_recording
from needle.training.notebook import fit
from needle.training.saved import SavedRun, open_run

__all__ = ["GraphedStep", "SavedRun", "fit", "open_run", "worth_recording"]
