"""Types of a Tensor and of a called module, and the stubs themselves, by mypy."""

import re
import sys

import pytest
from harness import ROOT, run

from building import stubs

SCRIPT = """
import numpy as np
import needle as ndl
import needle.nn.functional as F
from needle import nn

class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: ndl.Tensor, scale: float = 1.0) -> tuple[ndl.Tensor, float]:
        return ndl.where(x > 0, self.layer(x), 0.0), scale

net, x = Net(), ndl.ones(2, 3)
model, _ = ndl.create_pythia_70m()
reveal_type(net(x))
reveal_type(net(x, scale=2.0)[0])
reveal_type(nn.Sequential(net.layer, nn.ReLU())(x))
reveal_type(model(np.zeros((1, 8))))
reveal_type((x[0, :, None], x @ x.T + 1, net.layer.weight / 2, x == x))
reveal_type([row.exp() for row in x])
reveal_type(net.to("cpu").apply(print).eval().train(False).layer(x))
reveal_type(x.sum(0, keepdims=True).to(ndl.cpu()).contiguous())
reveal_type(x.sum(dim=1, keepdim=True).clamp(min=0).half().view(-1))
reveal_type(ndl.clamp(x, a_min=0) + F.softmax(x, dim=-1) + ndl.gather(x, dim=1, index=[[0]]))
reveal_type(x.gather(dim=0, index=[[0]]).chunk(2)[0])
reveal_type(x.topk(2).values & (x > 0))
reveal_type(ndl.NDArray([[1]]).sum(axis=0) + [1, 2, 3])
x.add_(1).mul_(x)
x += 1
net("x")
net(x, y=1)
x.softmax(dimension=1)
"""
SEEN = [
    "tuple[Tensor, float]",
    "Tensor",
    "Tensor",
    "tuple[Tensor, Tensor | None]",
    "tuple[Tensor, Tensor, Tensor, Tensor]",
    "list[Tensor]",
    *["Tensor"] * 6,
    "NDArray",
]


@pytest.mark.parity
def test_types_of_calls(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed (pip install .[parity])")
    (tmp_path / "script.py").write_text(SCRIPT)
    checked = [tmp_path / "script.py", *(ROOT / "needle" / name for name in stubs.STUBS)]
    words = ["--follow-imports=silent", "--cache-dir", tmp_path / "cache", *checked]
    done = run(sys.executable, "-m", "mypy", *words, MYPYPATH=ROOT)
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1] for line in lines if "Revealed type is" in line]
    names = [re.sub(r"needle\.(autograd\.tensor|_C)\.|builtins\.", "", text) for text in revealed]
    assert names == SEEN, done.stdout + done.stderr
    errors = [line for line in lines if ": error:" in line]
    assert len(errors) == 3, done.stdout
    assert 'incompatible type "str"; expected "Tensor"' in errors[0]
    assert 'Unexpected keyword argument "y"' in errors[1]
    assert 'Unexpected keyword argument "dimension"' in errors[2]
