"""Ranks on GPUs: the same bytes on one and on two, and ends that are told.

Two GPUs at least; elsewhere test_peers.py and test_nccl.py say the same of libraries that pretend.
"""

import re
import sys

import pytest
from gpu_trainings import *  # noqa: F403
from harness import ROOT, run
from struck_runs import GPURuns

from needle.distributed.group import visible_gpus

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(visible_gpus() < 2, reason=f"{visible_gpus()} GPUs are visible, and not 2"),
]

# How a rank of a program of the test's begins: `group` is connected, `device` its own.
BEGIN = f"""
import sys
import numpy as np
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests/distributed")!r}]
import needle as ndl
from needle import _C
from needle.distributed import environment
from needle.distributed.control import Control
from needle.distributed.group import Group
place = environment.find()
group = Group(place, Control.join(place, {{}}, deadline=30.0))
device = group.device("auto")
group.connect(device)
"""


def ended(tmp_path, body, code=0):
    """Runs the body as two ranks; (stdout, stderr)."""
    program = tmp_path / "program.py"
    program.write_text(BEGIN + body)
    start = "import sys; from needle.distributed import spawn; sys.exit(spawn.run(sys.argv[1:], 2))"
    done = run(sys.executable, "-c", start, sys.executable, program, PYTHONPATH=ROOT)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def ranks(tmp_path, body):
    return ended(tmp_path, body + "\ngroup.close()\n")[0]


# ---- bytes ---------------------------------------------------------------------------------------


NCCL = "group.connect(device)", "group._transport = group._nccl(device)"


@pytest.mark.parametrize("transport", ["PeerTransport", "NCCLTransport"])
def test_an_exchange_moves_every_byte(tmp_path, monkeypatch, transport):
    """Odd sizes and offsets, all dtypes, none at all, more than the copies of a step before."""
    if transport == "NCCLTransport":
        monkeypatch.setattr(sys.modules[__name__], "BEGIN", BEGIN.replace(*NCCL))
    body = f"assert type(group._transport).__name__ == {transport!r}\n"
    body += """
other = 1 - group.rank
def numbers(rank, size, seed):
    return np.random.RandomState(7 * seed + rank).randint(0, 256, size).astype(np.uint8)
for seed, size in enumerate([1, 3, 31, 257, 4097, 1 << 20, (1 << 26) + 13]):
    for begin in 0, 1, 5:
        own = _C.array(numbers(group.rank, size + begin, seed), "uint8", device)
        got = _C.empty((size + begin,), "uint8", device)
        got.fill(0)
        group.exchange("bytes", [(other, own[begin:])], [(other, got[begin:])])
        own.fill(0)  # after the exchange, in the stream's order
        found, wanted = got.numpy(), numbers(other, size + begin, seed)
        assert (found[begin:] == wanted[begin:]).all() and not found[:begin].any(), (size, begin)
for dtype in ("float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool", "uint16"):
    whole = _C.array(np.arange(34) % 2 + group.rank, "float32", device).astype(dtype)
    group.all_gather("a dtype", whole, [[slice(0, 17)], [slice(17, 34)]])
    wanted = np.concatenate([np.arange(17) % 2, np.arange(17, 34) % 2 + 1])
    wanted = wanted.astype(bool) if dtype == "bool" else wanted
    np.testing.assert_array_equal(whole.numpy(), wanted)
empty = _C.empty((0,), "float32", device)
group.exchange("nothing", [(other, empty)], [(other, empty)])
group.exchange("nothing", [], [])
for number in range(300):  # many that no call waits for
    x = _C.array(np.full(1000, number + group.rank, np.float32), "float32", device)
    y = _C.empty((1000,), "float32", device)
    group.exchange("one of many", [(other, x)], [(other, y)])
assert (y.numpy() == 299 + other).all()
two = [(other, _C.empty((n,), "float32", device)) for n in (5, 1000)]  # in their order
group.exchange("two at once", [(other, x[:5] * 2), (other, x)], two)
assert [y.numpy().tolist() for _, y in two] == [[2 * (299 + other)] * 5, [299 + other] * 1000]
a, waits = _C.array(np.eye(2048), "float32", device), []
for number in range(20):  # that kernels run beside, on memory which others let go of
    x = _C.array(np.full(1 << 20, number + group.rank, np.float32), "float32", device)
    x = x + a[0].sum() - 1  # behind the products
    y = _C.empty((1 << 20,), "float32", device)
    waits.append((group.begin("beside", [(other, x)], [(other, y)]), y))
    del x
    a = a @ a
    _C.empty((1 << 20,), "float32", device).fill(-1)
for number, (wait, y) in enumerate(waits):
    wait()
    assert (y.numpy() == number + other).all()
print("well")
"""
    assert ranks(tmp_path, body) == "well\n"


def test_gpus_that_each_rank_sees_alone(tmp_path, monkeypatch):
    """As some launchers show them."""
    own = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\n"
    monkeypatch.setattr(sys.modules[__name__], "BEGIN", own + BEGIN)
    body = """
other = 1 - group.rank
own, got = (_C.array(np.full(1 << 24, group.rank), "int32", device) for _ in range(2))
group.exchange("numbers", [(other, own)], [(other, got)])
assert (got.numpy() == other).all()
print(type(group._transport).__name__)
"""
    assert ranks(tmp_path, body) in ("PeerTransport\n", "NCCLTransport\n")


def test_more_bytes_than_31_bits_count(tmp_path):
    body = """
other, size = 1 - group.rank, (1 << 31) + 4097
own, got = (_C.empty((size,), "uint8", device) for _ in range(2))
own.fill(group.rank + 1)
own[size - 3 :].fill(group.rank + 7)
group.exchange("a large one", [(other, own)], [(other, got)])
assert got[:5].numpy().tolist() == [other + 1] * 5
assert got[size - 5 :].numpy().tolist() == [other + 1] * 2 + [other + 7] * 3
"""
    ranks(tmp_path, body)


# ---- trainings -----------------------------------------------------------------------------------

KINDS = {
    "float32": [],
    "bfloat16": ["--dtype", "bfloat16"],
    "graph": ["--dtype", "bfloat16", "--graph"],
    "recompute": ["--recompute"],
}


@pytest.fixture(scope="session")
def alone_of(tmp_path_factory, tokens):
    """alone_of(kind): what one GPU writes, by the name of the kind."""
    made = {}

    def written(kind):
        if kind not in made:
            runs = GPURuns(tmp_path_factory.mktemp(kind), tokens, *KINDS[kind])
            said = runs.run("alone", 1)
            assert f"{visible_gpus()} GPUs are visible, 1 is used: --gpus" in said
            made[kind] = runs.written("alone")
        return made[kind]

    return written


@pytest.fixture
def alone(alone_of):
    return alone_of("float32")


@pytest.fixture
def runs(tmp_path, tokens):
    return GPURuns(tmp_path, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_gpus_change_no_byte(tmp_path, tokens, alone_of, kind):
    runs = GPURuns(tmp_path, tokens, *KINDS[kind])
    runs.run("two", 2)
    assert runs.written("two") == alone_of(kind)


def test_sequences_are_shared(runs, alone):
    """Almost the numbers of one GPU, and the same bytes each time."""
    for name in "shared", "again":
        runs.run(name, 2, "--context-parallel", "2")
    assert runs.written("shared") == runs.written("again")
    for line, wanted in zip(runs.written("shared")[1], alone[1], strict=True):
        for word in line:
            assert line[word] == pytest.approx(wanted[word], rel=1e-3), (line["step"], word)


def test_a_rank_that_hangs_in_a_transfer_is_named(tmp_path):
    """Rank 1 never enqueues what rank 0's GPU waits for, and rank 0 waits for a result of it."""
    body = """
import time
group.control.deadline = 6.0
group.gather("the gradients", None)
x = _C.empty((1000,), "float32", device)
if group.rank == 0:
    group.exchange("the sum", [], [(1, x)])
    x.numpy()
time.sleep(20)
"""
    said = ended(tmp_path, body, code=75)[1]
    assert re.search("rank 0, .* 'the sum' at step 0: rank 0 waited [678] s in 'the sum' at", said)
    assert "rank 1, after 'the gradients' at step 0: rank 0 waited" in said, said


# ---- attention over a sequence that GPUs share ---------------------------------------------------


@pytest.mark.parametrize("dtype, head_dim", [("float32", 32), ("bfloat16", 64), ("bfloat16", 128)])
def test_ring_attention(tmp_path, dtype, head_dim):
    """Against float64 on the host, beside the errors of one GPU, whose gradients of keys are
    rounded once: here each is the sum of up to four that are."""
    body = f"""
from needle.ops import attention, ring_attention
from needle.testing.attention import softmax_attention, softmax_attention_bwd, visible
from ring import distances, tokens_of
T, dtype, scale = 1024, {dtype!r}, {head_dim} ** -0.5
random = np.random.RandomState(0)
arrays = [random.standard_normal((2, T, 2, {head_dim})) for _ in range(4)]
arrays = [_C.array(x, dtype, _C.cpu()).numpy().astype(np.float64) for x in arrays]
own = tokens_of(group.rank, group.size, T)
def attended(compute, arrays):
    tensors = [ndl.Tensor(x, device=device, dtype=dtype) for x in arrays]
    result = compute(*tensors[:3])
    result.backward(tensors[3])
    return [x.numpy().astype(np.float64) for x in (result, *(x.grad for x in tensors[:3]))]
ring = lambda *qkv: ring_attention(*qkv, group)
shared, again = (attended(ring, [x[:, own] for x in arrays]) for _ in range(2))
assert all((x == y).all() for x, y in zip(shared, again))
alone = [x[:, own] for x in attended(attention, arrays)]
q, k, v, dout = arrays
see = visible(T, T, True)
made = softmax_attention(np.asarray, q, k, v, scale, see)
gradients = softmax_attention_bwd(np.asarray, dout, q, k, v, made["o"], made["lse"], scale, see)
wanted = [x[:, own] for x in (made["o"], *gradients.values())]
for n, (mine, one) in enumerate(zip(distances(shared, wanted), distances(alone, wanted))):
    most = 1.1 if n < 2 or dtype == "float32" else 1.5
    assert mine <= most * one + 1e-7, (n, mine, one)
"""
    ranks(tmp_path, body)
