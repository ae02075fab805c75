"""Facts and examinations: what this needle is built from and runs on, and what is wrong with it.

    python -m needle.diagnose            under 10 s; `--help` has the flags
    needle.show_config()                 the facts alone, in Python

`facts` is this build and this machine. `command` is the program: it gathers what examinations find,
each of which runs in a process of its own (`children`, `roles`), because what it looks at may hang
or kill it: `machine` asks the driver about each GPU, `walk` tries every op, `step` trains a tiny
Pythia, `rates` measures, `recovery` plants a fault, `folder` looks into a run, `server` asks a
kernel service.
"""

from needle import _C
from needle.diagnose.command import main
from needle.diagnose.facts import (
    collect,
    cuda_problem,
    describe,
    gigabytes,
    lines,
    remedy,
    self_test,
    show_config,
)
