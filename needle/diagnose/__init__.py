"""Diagnosis: facts about this needle and its machine, and checks that find what is broken.

    needle diagnose            some seconds; `--help` has the flags
    needle.show_config()       the facts alone, in Python

`__main__` starts each part in a process of its own (`parts`), because what it examines may hang or
kill it: `facts`, `gpus` (nvidia-smi), `device` (every op, rates), `ranks` (collectives),
`folder` (a run), `server` (a kernel service).
"""

from needle.diagnose.facts import show_config
