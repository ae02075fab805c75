"""apps/slurm.sbatch, with an srun and an scontrol that write down what they are asked for, and by a
Slurm of one machine where it can start."""

import json
import os
import re
import sys
import time

import pytest
import rank_runs
import slurm_cluster
from harness import ROOT, run

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "apps" / "slurm.sbatch"
MISSING = rank_runs.missing() or slurm_cluster.missing()


@pytest.fixture
def submit(tmp_path):
    """submit(exit code of srun, flags, variables) -> (exit code, words of srun, of scontrol)."""
    says = {
        "srun": 'printf "%s\\n" "$@" >srun.words;echo $NEEDLE_RANKS_KEY >srun.key;exit $srun_code',
        "scontrol": 'printf "%s\\n" "$@" >scontrol.words',
        "squeue": 'echo "$squeue_says"',
    }
    for name, lines in says.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)

    def submitted(code, *flags, **environ):
        for path in tmp_path.glob("*.words"):
            path.unlink()
        clean = dict.fromkeys(name for name in os.environ if name.startswith("SLURM_"))
        clean |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        clean |= {"srun_code": code, "PYTHON": "/opt/my python"}
        done = run("bash", SCRIPT, *flags, cwd=tmp_path, **clean | environ)
        assert done.stderr == ""
        words = [tmp_path / "srun.words", tmp_path / "scontrol.words"]
        said = [path.read_text().splitlines() if path.exists() else [] for path in words]
        return done.returncode, *said

    return submitted


def test_the_flags_reach_the_app(submit):
    code, srun, scontrol = submit(0, "--recipe", "pythia", "--data", "a b", "--name", "mine")
    assert (code, scontrol) == (0, [])
    assert srun[2:] == ["/opt/my python", "apps/train_pythia.py", "--resume", "auto"] + [
        *("--name", "slurm-17", "--recipe", "pythia", "--data", "a b", "--name", "mine")
    ]


def test_each_job_has_a_key_of_its_own(submit, tmp_path):
    keys = []
    for given in ({}, {}, {"NEEDLE_RANKS_KEY": "given by the user"}):
        submit(0, **given)
        keys.append((tmp_path / "srun.key").read_text().strip())
    assert keys[0] != keys[1] and keys[2] == "given by the user"
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys[:2])


def test_back_into_the_queue(submit):
    soon, late = (str(int(time.time()) + seconds) for seconds in (100, 10_000))
    assert submit(75)[2] == ["requeue", "17"]
    for code, end, count, again in (
        (0, soon, "0", True),
        (0, late, "0", False),
        (1, soon, "0", False),
        (75, late, "9", True),
        (75, late, "10", False),
    ):
        done, _, scontrol = submit(code, SLURM_JOB_END_TIME=end, SLURM_RESTART_COUNT=count)
        assert done == code and bool(scontrol) == again, (code, end, count)


def test_an_old_slurm_is_asked_when_the_time_ends(submit):
    for end, again in (("now + 100 seconds", True), ("now + 3 hours", False)):
        said = run("date", "--date", end, "+%FT%T").stdout.strip()
        assert bool(submit(0, squeue_says=said)[2]) == again, end
    for nothing in ("N/A", "Unknown", ""):
        assert not submit(0, squeue_says=nothing)[2]


def test_its_lines_are_sbatchs():
    lines = re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", SCRIPT.read_text(), re.MULTILINE)
    said = dict(lines)
    assert said["--signal"] == "TERM@120" and said["--open-mode"] == "append"
    assert "--requeue" in said and said["--gpus-per-node"] == said["--ntasks-per-node"]
    body = SCRIPT.read_text().partition("\npython=python3")[0]
    assert all(not line or line.startswith("#") for line in body.splitlines())


@pytest.fixture
def cluster(tmp_path):
    made = slurm_cluster.Cluster(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_real_slurm(cluster, tmp_path, tokens):
    """Two ranks on the CPU. The end of the time comes before that of the run: it is saved, goes
    back into the queue and on, and has the bytes of a run without a stop."""
    runs = rank_runs.MPIRuns(tmp_path, tokens)
    runs.run("alone", 0)
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(
        "#!/bin/sh\nshift  # the app, for the program of the tests\n"
        '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || PLAN=null\n'
        f'export PLAN\nexec "{sys.executable}" "{rank_runs.PROGRAM}" "$@"\n'
    )
    python.chmod(0o755)
    plan = {"rank": 1, "step": 0, "what": "slow", "seconds": 1}
    cluster.environ |= {"PYTHON": str(python), "PLAN": json.dumps(plan), "PYTHONPATH": str(ROOT)}
    # Slurm looks for what is near its end every 30 s: SIGTERM comes after 20 to 50 s.
    job = cluster.ask(
        *("sbatch", "--parsable", "--time=1", "--signal=TERM@10", "--gpus-per-node=0"),
        *("--ntasks-per-node=2", f"--output={said}", f"--chdir={ROOT}", str(SCRIPT)),
        *map(str, runs.words("out")),
    ).strip()
    state = ""
    for _ in range(180):
        state = cluster.ask("scontrol", "--oneliner", "show", "job", job)
        if "Restarts=0" not in state and "TimeLimit=00:01:00" in state:
            cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=10", "StartTime=now")
        if re.search("JobState=(COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL)", state):
            break
        time.sleep(1)
    log = said.read_text()
    assert "JobState=COMPLETED" in state and "ExitCode=0:0" in state, state + log
    stopped = re.findall(rf"stopped by SIGTERM after step (\d+) of {runs.steps}, and saved", log)
    assert len(stopped) == 1 and 0 < int(stopped[0]) < runs.steps, log
    assert log.count("the time is over: back into the queue") == 1, log
    assert runs.written("out") == runs.written("alone")
