"""Soak test against the pool of kernels, on a GPU.

    python tests/kernels/pool_soak.py [--jobs 1000] [--seed 0]     mixed jobs: nothing hangs,
        nothing stays: memory of host and GPU, files, threads and processes return to what they were
    python tests/kernels/pool_soak.py --training [--steps 300]     a training on the same GPU,
        of so many steps or more, until every fault has come beside it, and as many steps alone: its
        losses are equal bit for bit

A job is a good one, or one of the faults of faulty_kernels.py, or a kill of a process that waits or
works; a third come from other threads. The exit code is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]

from fake_pool import children, fds  # noqa: E402
from faulty_kernels import FAULTS, check, good, inject  # noqa: E402

from needle.kernels import Pool  # noqa: E402
from needle.kernels import pool as pool_module  # noqa: E402

HUNG_SECONDS = 120  # without a job that ends
TRAINING = """
import itertools
import select
import sys
import numpy as np
import needle as ndl
from needle import nn, optim
from needle.models.pythia import Pythia, PythiaConfig

np.random.seed(0)
config = PythiaConfig(vocab_size=1024, hidden_size=256, num_layers=4, num_heads=4,
                      intermediate_size=1024, max_seq_len=256)
model = Pythia(config, device=ndl.cuda(), dtype="bfloat16")
optimizer = optim.AdamW(nn.flatten_parameters(model), lr=1e-3)
for step in itertools.count(1):
    ids = np.random.randint(0, 1024, (8, 257))
    _, loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.reset_grad()
    print(float(loss.numpy()).hex(), flush=True)
    if step >= int(sys.argv[1]) and select.select([sys.stdin], [], [], 0)[0]:
        break  # standard input was closed
"""


def gpu_bytes() -> int:
    """MiB in use on the first GPU that CUDA sees, by all; 0 where nvidia-smi does not tell."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", first]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kill_one(pool: Pool, rng: random.Random) -> None:
    """SIGKILL or SIGSTOP for a runner or the compiler, whatever it does now. What it had is
    answered as crashed or timeout, so the next job is not judged, the one after it is."""
    pids = [pid for d in pool.state() for pid in d["ready"] + d["used"]]
    pids += [worker.pid for worker in pool.compilers.ready]
    if pids:
        try:
            os.kill(rng.choice(pids), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
        except ProcessLookupError:
            pass  # it had ended


def jobs(count: int, seed: int) -> int:
    """Prints a line a kind of job, and what is left; the number of wrong answers."""
    rng = random.Random(seed)
    pool_module.COMPILE_SECONDS = 5.0  # a compiler that was stopped is waited for so long
    before = fds(), children(), threading.active_count()
    gpu_before = gpu_bytes()
    seen: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    began = time.monotonic()
    with Pool(devices=[0], timeout=1.0) as pool:
        good(pool)
        early = resident()

        def one(name: str) -> None:
            try:
                if name == "good":
                    good(pool)
                else:
                    check(name, inject(pool, name))
            except AssertionError as error:
                wrong.append(f"{name}: {str(error)[:300]}")

        def after_kill() -> None:
            """Until an answer is right: the one that was hit may be gone, and its successor in a
            stopped process too."""
            for _ in range(4):
                try:
                    return good(pool)
                except AssertionError as error:
                    last = str(error)[:300]
            wrong.append(f"after a kill: {last}")

        done = 0
        while done < count:
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
            name = rng.choice([*FAULTS, *["good"] * len(FAULTS), "kill"])
            if name == "kill":
                kill_one(pool, rng)
                after_kill()
                seen[name], done = seen[name] + 1, done + 1
            elif rng.random() < 0.33:
                names = [name, *rng.choices(list(FAULTS), k=2)]
                threads = [threading.Thread(target=one, args=(n,)) for n in names]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                seen.update(names)
                done += len(names)
            else:
                one(name)
                seen[name], done = seen[name] + 1, done + 1
        faulthandler.cancel_dump_traceback_later()
        good(pool)
        late, state = resident(), pool.state()[0]
    gc.collect()
    time.sleep(1.0)
    after = fds(), children(), threading.active_count()
    for name, times in sorted(seen.items()):
        print(f"{times:5}  {name}")
    print(
        f"{done} jobs in {time.monotonic() - began:.0f} s, {len(wrong)} wrong; {state['faults']} "
        f"faults, {state['started']} processes started, set aside: {state['set_aside']}"
    )
    print(f"files, processes, threads: {before} before, {after} after")
    print(f"host memory: {(late - early) / 2**20:+.1f} MiB; GPU: {gpu_bytes() - gpu_before:+} MiB")
    for line in wrong[:20]:
        print("wrong:", line)
    left = before != after or late - early > 64 << 20 or gpu_bytes() - gpu_before > 64
    return len(wrong) + left


def train(steps: int, stdin: int) -> subprocess.Popen[str]:
    """`steps`, and on until its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(steps)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def beside_a_training(steps: int) -> int:
    """Losses while every one of FAULTS comes, each followed by a good job, and again alone."""
    wrong: list[str] = []
    # A fault takes longer to be seen where another process keeps the GPU busy.
    with Pool(devices=[0], timeout=5.0) as pool:
        good(pool)
        training = train(steps, subprocess.PIPE)
        losses: list[str] = []
        reader = threading.Thread(target=lambda: losses.extend(training.stdout))
        reader.start()
        while not losses and training.poll() is None:
            time.sleep(0.01)
        for name in FAULTS:
            began = time.monotonic()
            try:
                check(name, inject(pool, name))
                good(pool)
            except AssertionError as error:
                wrong.append(f"{name}: {str(error)[:300]}")
            print(f"{time.monotonic() - began:7.2f} s  {name}, then a good job", flush=True)
        beside = len(losses)
        training.stdin.close()
        reader.join()
        training.wait()
        training.stdout.close()
    alone, _ = train(len(losses), subprocess.DEVNULL).communicate()
    equal = losses == alone.splitlines(keepends=True) and training.returncode == 0 < beside
    print(f"{len(losses)} losses, {beside} of them beside {len(FAULTS)} faults: equal: {equal}")
    print(f"exit code {training.returncode}; first {losses[:1]}, last {losses[-1:]}")
    for line in wrong:
        print("wrong:", line)
    return len(wrong) + (not equal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--training", action="store_true", help="beside a training instead")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    args = parser.parse_args()
    wrong = beside_a_training(args.steps) if args.training else jobs(args.jobs, args.seed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
