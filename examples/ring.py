"""Ring and dilated attention over one sequence that several ranks share, beside one process.

    python examples/ring.py                                        one process
    mpirun -n 2 python examples/ring.py                            a GPU a rank, else the CPU
    torchrun --standalone --nproc-per-node 2 examples/ring.py      a GPU a rank

Each rank has two chunks of the tokens (`ring_chunks`), an early and a late one, so that all have
the same work under the causal mask. The results and the gradients are compared with those of
attention over the whole sequence in this process.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import checkout

checkout.choose()

import needle as ndl  # noqa: E402
from needle.distributed.control import Control  # noqa: E402
from needle.distributed.environment import find  # noqa: E402
from needle.distributed.group import Group  # noqa: E402
from needle.processes import program  # noqa: E402

B, T, H, D = 1, 1024, 4, 32
SEGMENTS, DILATIONS = (128, 1024), (1, 4)  # LongNet's: near tokens, and every fourth of all


def join() -> tuple[Group, ndl.Device]:
    """Return the group of the ranks that a launcher started, or of this process alone."""
    place = find()
    group = Group() if place is None else Group(place, Control.join(place, {"tokens": str(T)}))
    device = group.device("auto")
    group.connect(device)
    return group, device


def gradients(attention, arrays: list[np.ndarray], weights: np.ndarray, device) -> list[np.ndarray]:
    """Return the result of attention(q, k, v), and the gradients of its sum times `weights`."""
    q, k, v = (ndl.Tensor(x, device=device) for x in arrays)
    out = attention(q, k, v)
    (out * ndl.Tensor(weights, device=device)).sum().backward()
    return [out.numpy(), *(x.grad.numpy() for x in (q, k, v))]


def main() -> None:
    group, device = join()
    *whole, weights = np.random.default_rng(0).standard_normal((4, B, T, H, D), np.float32)
    own = np.r_[tuple(ndl.ops.ring_chunks(T, group.rank, group.size))]  # this rank's tokens
    dilated = {"segments": SEGMENTS, "dilations": DILATIONS, "causal": True}
    for name, shared, alone in (
        (
            "ring",
            lambda q, k, v: ndl.ops.ring_attention(q, k, v, group),
            lambda q, k, v: ndl.ops.attention(q, k, v, causal=True),
        ),
        (
            "ring, dilated",
            lambda q, k, v: ndl.ops.ring_dilated_attention(q, k, v, group, **dilated),
            lambda q, k, v: ndl.ops.dilated_attention(q, k, v, **dilated),
        ),
    ):
        got = gradients(shared, [x[:, own] for x in whole], weights[:, own], device)
        want = gradients(alone, whole, weights, device)
        errors = [float(abs(a - b[:, own]).max()) for a, b in zip(got, want)]
        for rank, error in enumerate(group.gather(name, max(errors))):
            if group.rank == 0:
                print(f"{name}: rank {rank} of {group.size} on {device}: {error:.1e} at most")
        assert max(errors) < 1e-3, errors
    group.close()


if __name__ == "__main__":
    sys.exit(program(main))
