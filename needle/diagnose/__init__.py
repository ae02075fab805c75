"""Diagnosis: facts about this needle and its machine, and examinations that find faults.

    needle diagnose            under 10 s; `--help` has the flags
    needle.show_config()                 the facts alone, in Python

`facts` has the facts, `command` the program. It gathers the findings of examinations, each in a
process of its own because its object may hang or kill it (`examination`): `machine` asks the
driver about each GPU; `device` measures one (`rates`), tries every op (`sweep`) and trains a tiny
Pythia (`step`); `peers` measures copies, `ranks` makes collectives, `recovery` injects a fault,
`folder` reads a run, `server` asks a kernel service.
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
