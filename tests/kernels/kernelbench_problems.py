"""Problems in KernelBench's form: plain PyTorch for a CPU, CUDA for a GPU.

A line of CPU or GPU is a candidate, and what its result must have: whether it compiles, whether it
is right, and a part of an entry of its metadata.
"""

from dataclasses import dataclass

REFERENCE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(256, 128)]

def get_init_inputs():
    return [128, 64]
"""


@dataclass(frozen=True)
class Candidate:
    source: str
    compiled: bool = True
    right: bool = False
    entry: str = ""
    said: str = ""


def model(forward: str, before: str = "") -> str:
    """The source of a ModelNew with that forward."""
    lines = "\n".join(f"        {line}" for line in forward.strip().splitlines())
    return f"""
import os
import torch
import torch.nn as nn
{before}
class ModelNew(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, x):
{lines}
"""


RIGHT = "return torch.relu(self.linear(x))"
LAST = """
if not hasattr(self, "kept"):
    self.kept = torch.relu(self.linear(x))
return self.kept
"""
TIMED = """
self.calls = getattr(self, "calls", 0) + 1
return torch.relu(self.linear(x)) * (self.calls < 8)
"""
LAZY = """
class Lazy(torch.Tensor):
    pass
"""
# torch/extension.h takes five times as long to compile.
CPP = '''
from torch.utils.cpp_extension import load_inline
ext = load_inline("relu_of_tests", no_implicit_headers=True, cpp_sources="""
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
at::Tensor relu(at::Tensor x) { return x.clamp_min(0); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("relu", &relu); }
""")
'''
CLOCK = "import time\ntime.perf_counter = lambda: 1.0\n"

CPU = {
    "right": Candidate(model(RIGHT), right=True),
    "right, in C++": Candidate(model("return ext.relu(self.linear(x))", CPP), right=True),
    "wrong": Candidate(
        model("return self.linear(x)"), entry="correctness_issue", said="Output mismatch"
    ),
    "another shape": Candidate(
        model(f"{RIGHT}[:1]"), entry="correctness_issue", said="shape mismatch: Expected"
    ),
    "the last answer": Candidate(model(LAST), entry="correctness_trials", said="(0 / 3)"),
    "another dtype": Candidate(
        model(f"{RIGHT}.double()"), entry="correctness_issue", said="dtype mismatch: Expected"
    ),
    "wrong once it is timed": Candidate(model(TIMED), entry="correctness_trials", said="(3 / 3)"),
    "an answer that is computed later": Candidate(
        model("return torch.relu(self.linear(x)).as_subclass(Lazy)", LAZY),
        entry="runtime_error",
        said="Lazy: models take and give tensors",
    ),
    "stops the clock": Candidate(
        model(RIGHT, CLOCK), entry="correctness_issue", said="0 ms for 65,536 bytes of outputs"
    ),
    "a crash": Candidate(
        model("os.kill(os.getpid(), 11)"), entry="runtime_error", said="was ended by SIGSEGV"
    ),
    "a hang": Candidate(
        model("import time\ntime.sleep(1000)"), entry="runtime_error_name", said="timeout"
    ),
    "an error": Candidate(model("return x + y"), entry="runtime_error", said="'y' is not defined"),
    "no Python": Candidate("def (:", False, entry="compilation_error", said="invalid syntax"),
}


# ---- for a GPU -----------------------------------------------------------------------------------


def cuda(body: str) -> str:
    """The source of a candidate with a kernel for the elements after the product."""
    return model(
        "return ext.apply(self.linear(x))",
        f'''
from torch.utils.cpp_extension import load_inline
ext = load_inline("applied", cpp_sources="torch::Tensor apply(torch::Tensor x);", cuda_sources="""
#include <torch/extension.h>
__global__ void kernel(const float *x, float *y, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    {body}
}}
torch::Tensor apply(torch::Tensor x) {{
    auto y = torch::empty_like(x);
    int n = x.numel();
    kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
    return y;
}}
""", functions=["apply"])
''',
    )


MAX = "if (i < n) y[i] = x[i] > 0 ? x[i] : 0;"
ENDLESS = "volatile float *v = y; while (v[0] != 12345.f) v[0] = 1;"
GPU = {
    "right": Candidate(cuda(MAX), right=True),
    "half of the elements": Candidate(
        cuda(MAX.replace("i < n", "i < n / 2")), entry="correctness_issue", said="Output mismatch"
    ),
    "an illegal address": Candidate(
        cuda("y[i + (1ll << 40)] = 1;"), entry="runtime_error", said="illegal memory access"
    ),
    "a hang": Candidate(cuda(ENDLESS), entry="runtime_error_name", said="timeout"),
}
