"""`import needle`: how little it loads, how fast, its names, and its words without a GPU."""

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest
from harness import run

import needle as ndl


def python(code: str, **environment) -> subprocess.CompletedProcess:
    return run(sys.executable, "-X", "dev", "-W", "error", "-c", code, **environment)


IMPORTS = """
import sys, needle
with open('/proc/self/maps') as file:
    maps = file.read()
assert '_cuda' not in maps and 'libcuda' not in maps and 'cublas' not in maps, maps
heavy = {'torch', 'transformers', 'matplotlib', 'tokenizers', 'tqdm', 'safetensors', 'scipy'}
heavy |= {'needle.testing'}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_importing_opens_no_gpu_and_no_heavy_package():
    """Nothing of CUDA is loaded, and none of what only tests, apps and checkpoints need."""
    done = python(IMPORTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
    assert python("import sys, needle.testing; sys.exit('pytest' in sys.modules)").returncode == 0


def test_settings_of_openblas_are_not_numpys():
    """They are in the environment only while the core's own copy is loaded."""
    script = """
import os, sys
class Watch:
    def find_spec(name, path, target=None):
        if name == "numpy":
            print(os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OPENBLAS_CORETYPE"))
sys.meta_path.insert(0, Watch)
before = dict(os.environ)
import needle
print(dict(os.environ) == before)
"""
    own = ("OPENBLAS_", "OMP_", "GOMP_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "None", "True"], done.stderr


def test_ctrl_c_is_no_traceback():
    """Ctrl-C comes in a program, and while the program of a word imports its packages."""
    for code in (
        "from needle.processes import program; raise SystemExit(program(stopped))",
        "from needle import command; command.pkgutil.resolve_name = stopped\n"
        "raise SystemExit(command.main(['evaluate']))",
    ):
        done = python(f"def stopped(*_, **__): raise KeyboardInterrupt\n{code}")
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_program_without_its_packages_says_what_to_install():
    code = "import sys; sys.modules['lm_eval'] = None; from needle import command\n"
    for words in ["--tasks", "x"], ["--help"]:
        done = python(f"{code}raise SystemExit(command.main({['lm_eval', *words]}))")
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert "needle lm_eval, the LM evaluation harness on a needle model: " in done.stderr
        assert "-m pip install lm_eval" in done.stderr


def test_importing_is_fast(tmp_path):
    """Under 100 ms more than NumPy: the best of five of each, in processes of their own, in turns,
    as what else runs makes processors slower. Processor time; importing waits for nothing. The
    bytecode is cached, as it is from a user's second import on: the first of the five compiles it,
    also where the environment says not to write it beside the source."""
    # An empty PYTHONDONTWRITEBYTECODE is none.
    environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    code = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"

    def seconds(modules: str) -> float:
        return float(run(sys.executable, "-c", code.format(modules), **environment).stdout)

    pairs = [(seconds("numpy, needle"), seconds("numpy")) for _ in range(5)]
    both, alone = map(min, zip(*pairs))
    assert both - alone < 0.1


WITHOUT_DRIVER = """
import needle as ndl
assert ndl.cuda().enabled() is False
assert str(ndl.cuda()) == 'cuda()' and ndl.cuda() == ndl.cuda(0)
uses = [
    lambda: ndl.NDArray([1.0], device=ndl.cuda()),
    lambda: ndl.Tensor([1.0], device=ndl.cuda()),
    lambda: ndl.cuda().synchronize(),
    lambda: ndl.NDArray([1.0]).to(ndl.cuda()),
    ndl.cuda_init,
]
for use in uses:
    try:
        use()
    except RuntimeError as error:
        print(error)
    else:
        raise SystemExit('nothing was raised')
assert ndl.NDArray([1.0]).numpy() == 1
"""


def test_without_a_driver_cuda_says_why():
    """CUDA_VISIBLE_DEVICES hides every GPU; without a driver there is none to hide."""
    done = python(WITHOUT_DRIVER, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.lower()
    assert len(said.splitlines()) >= 5  # one reason for each use
    assert any(word in said for word in ("driver", "device", "built", "_cuda")), said


NAMES = """
needle: cpu cuda all_devices default_device NDArray Tensor TensorTuple no_grad ops nn init optim
    data autograd models backend_ndarray cuda_init cuda_reset CudaError CudaFatalError show_config
    add multiply divide power add_scalar multiply_scalar divide_scalar power_scalar negate matmul
    summation broadcast_to reshape transpose log exp relu tanh logsumexp logsoftmax stack split flip
    make_tuple tuple_get_item index_select where arange concatenate from_dlpack save load fit
    block_sparse_attention convert_to_block_mask BlockMask
needle.backend_ndarray: array empty full ones zeros NDArray cpu cuda all_devices default_device
needle.autograd: Tensor TensorTuple Op find_topo_sort no_grad
needle.init: rand randn randb constant ones zeros one_hot zeros_like ones_like kaiming_uniform
    kaiming_normal xavier_uniform xavier_normal
needle.nn: Module Parameter Linear ReLU GELU Sequential Residual Flatten Dropout LayerNorm1d
    BatchNorm1d SoftmaxLoss Embedding MultiHeadAttention AttentionLayer TransformerLayer Transformer
needle.optim: SGD Adam AdamW clip_grad_norm
needle.data: DataLoader NDArrayDataset
"""


def test_names():
    for line in NAMES.strip().replace("\n    ", " ").splitlines():
        module, names = line.split(": ")
        for name in names.split():
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    assert issubclass(ndl.CudaFatalError, ndl.CudaError) and issubclass(ndl.CudaError, RuntimeError)


@pytest.mark.parametrize("module", [ndl, ndl.ops])
def test_all_is_written_out_for_type_checkers(module):
    lazy = {"annotations", *ndl._LAZY}
    for name, value in vars(module).items():
        if not name.startswith("_") and not isinstance(value, ModuleType):
            assert name in module.__all__ or name in lazy, name
    assert len(set(module.__all__)) == len(module.__all__)
