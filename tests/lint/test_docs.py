"""The examples in needle's docstrings run and print what they say; public functions are typed."""

import ast
import doctest
import importlib
import operator
from pathlib import Path

import numpy as np
import pytest

import needle as ndl
from needle import backend_ndarray, nn, optim

PACKAGE = Path(ndl.__file__).resolve().parent
# Three are for packages that may not be there; __main__.py is no module to import.
NOT_HERE = "__main__.py", "lm_eval.py", "mpi.py", "torch_worker.py"
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in NOT_HERE]
# Where a reader looks first, there is an example in each of these.
SHOWN = {
    "ops": "add divide power exp log relu gelu summation mean max softmax logsumexp logsoftmax "
    "reshape broadcast_to transpose permute flip stack concatenate split matmul linear embedding "
    "index_select get_item where "
    "cross_entropy layer_norm attention block_sparse_attention dilated_attention",
    "nn": "Module Linear Sequential Residual Flatten Dropout LayerNorm1d BatchNorm1d Embedding "
    "SoftmaxLoss MultiHeadAttention Transformer flatten_parameters",
    "optim": "SGD Adam AdamW grad_norm clip_grad_norm Cosine",
    "init": "rand randn randb constant arange one_hot from_dlpack xavier_uniform kaiming_uniform",
    "autograd": "Tensor no_grad find_topo_sort",
    "autograd.operators": "Operators",
    "backend_ndarray": "full broadcast_to flip maximum summation",
    "block_mask": "BlockMask convert_to_block_mask",
    "checkpoint": "load_checkpoint save load",
    "training": "fit",
    "data.dataset": "DataLoader",
    "models.pythia": "Pythia PythiaConfig.preset Pythia.from_pretrained Pythia.generate "
    "Pythia.stream Pythia.hooks Pythia.run_with_cache Pythia.hidden_states",
    "models.gpt_neox": "config_to_hf",
    "models.registry": "preset preset_names",
    "generation": "generate_text",
    "sampling": "sample",
    "training.evaluate": "windows perplexity",
}


def module_of(path: Path):
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return importlib.import_module(".".join(names).removesuffix(".__init__"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_examples(path, tmp_path):
    """Examples see ndl, nd, nn, optim, np, and an empty `folder`."""
    names = {"ndl": ndl, "nd": backend_ndarray, "nn": nn, "optim": optim, "np": np}
    module = module_of(path)
    before = np.random.get_state()
    try:
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, globs={}):
            test.globs = {**names, "folder": tmp_path}
            report: list[str] = []
            failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
            assert not failed, "".join(report)
    finally:
        np.random.set_state(before)


@pytest.mark.parametrize("module", SHOWN)
def test_there_is_an_example(module):
    home = importlib.import_module(f"needle.{module}")
    for name in SHOWN[module].split():
        shown = operator.attrgetter(name)(home).__doc__ or ""
        assert ">>> " in shown, f"needle.{module}.{name}"


def untyped(body: list[ast.stmt], owner: str = "") -> list[str]:
    """Public functions and constructors that leave out the type of a parameter or of the result."""
    found = []
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += untyped(node.body, f"{node.name}.")
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name.startswith("_") and node.name != "__init__":
            continue
        a = node.args
        named = a.posonlyargs + a.args + a.kwonlyargs + [x for x in (a.vararg, a.kwarg) if x]
        static = any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
        named = named[1:] if owner and not static else named
        bare = [x.arg for x in named if x.annotation is None]
        bare += ["the result"] if node.returns is None else []
        found += [f"line {node.lineno}: {owner}{node.name}: {', '.join(bare)}"] if bare else []
    return found


# References are formulas of operands, whose kinds are those of the table.
REFERENCES = {
    PACKAGE / "testing" / f"{name}.py"
    for name in ("attention", "elementwise", "fp8", "layers", "random")
}


def test_public_functions_are_typed():
    for path in sorted({*PACKAGE.rglob("*.py")} - REFERENCES):
        assert untyped(ast.parse(path.read_text()).body) == [], path
