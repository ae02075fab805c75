"""A short form of the campaign (tests/campaign.py), in a process of its own: it forks."""

import subprocess
import sys

import pytest
from harness import ROOT

# part -> how many of its tries
SHORT = {
    "kills": 6,
    "kills_in_a_save": 4,
    "fights": 1,
    "full_disks": 3,
    "io_errors": 4,
    "damaged_files": 1000,
    "long_run": 200,
}


@pytest.mark.parametrize("part", SHORT)
def test_nothing_is_lost(part):
    command = [
        sys.executable,
        str(ROOT / "tests" / "campaign.py"),
        part,
        "--count",
        str(SHORT[part]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "lost: 0" in done.stdout, done.stdout + done.stderr


def test_a_loss_is_seen():
    """The campaign can fail: a checkpoint that vanishes, and a run that goes another way."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import campaign
honest = campaign.train_pythia.prune_checkpoints
campaign.train_pythia.prune_checkpoints = lambda folder, written, **_: [
    path.unlink() for path in campaign.list_checkpoints(folder) if written < campaign.STEPS]
sys.exit(campaign.campaign({{"kills": 8}}, seed=1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "had been saved" in done.stdout, done.stdout + done.stderr
