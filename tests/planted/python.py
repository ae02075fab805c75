"""The sample of Python's faults, which cosmic-ray makes, and which tests see which file.

About TOTAL of them, spread over the files in proportion to their lines, one at least wherever
cosmic-ray finds something to change. In a file places are drawn, then one of a place's changes:
else arithmetic, which has a dozen changes a place, would be most of the sample. What changes only
annotations, which nobody evaluates, is no fault. A file's draw depends on SEED and on that file
alone, but for how many it gets.
"""

import ast
import random
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from planted.fault import Fault, ListError

TOTAL, SEED = 120, 2026
SOURCES = ("needle/**/*.py", "apps/*.py", "building/*.py", "checkout.py", "setup.py")

GRADIENTS = "tests/test_autograd.py tests/test_changed_data.py"
# The longest beginning of a file's path counts.
TESTS = {
    "needle/__init__.py": "tests/test_import.py tests/csrc/test_threads.py",
    "needle/autograd.py": f"{GRADIENTS} tests/csrc/test_leaks.py",
    "needle/backend_ndarray.py": "tests/csrc/test_device.py tests/csrc/test_ndarray.py",
    "needle/block_mask.py": "tests/test_block_mask.py tests/ops/test_attention.py",
    "needle/checkpoint.py": "tests/test_checkpoint.py tests/apps/test_survival.py",
    "needle/data/": "tests/data",
    "needle/data/__main__.py": "tests/data/test_prepare.py tests/data/test_text.py",
    "needle/data/batches.py": "tests/data/test_token_data.py tests/data/test_sample_order.py",
    "needle/data/dataset.py": "tests/data/test_data.py",
    "needle/data/megatron.py": "tests/data/test_token_data.py tests/data/test_sample_order.py",
    "needle/data/prefetch.py": "tests/data/test_prefetch.py",
    "needle/data/prepare.py": "tests/data/test_prepare.py",
    "needle/data/readers.py": "tests/data/test_token_data.py tests/data/test_damaged_files.py",
    "needle/data/text.py": "tests/data/test_text.py",
    "needle/data/tokens.py": "tests/data/test_token_data.py tests/data/test_damaged_files.py",
    "needle/diagnose.py": "tests/test_diagnose.py",
    "needle/evaluate.py": "tests/test_evaluate.py",
    "needle/files.py": "tests/test_files.py tests/test_checkpoint.py",
    "needle/generation.py": "tests/test_generate.py",
    "needle/graph.py": GRADIENTS,
    "needle/hf/": "tests/test_hf.py",
    "needle/hooks.py": "tests/test_hooks.py",
    "needle/init.py": "tests/nn tests/test_operators.py",
    "needle/lm_eval.py": "tests/test_lm_eval.py -m parity",
    "needle/models/": "tests/models/test_pythia.py tests/test_checkpoint.py",
    "needle/models/gpt_neox.py": "tests/test_hf.py",
    "needle/models/registry.py": "tests/models/test_pythia.py tests/test_hf.py",
    "needle/nn/": "tests/nn tests/test_hooks.py",
    "needle/operators.py": "tests/test_operators.py",
    "needle/ops/": f"{GRADIENTS} tests/ops tests/test_operators.py tests/nn",
    "needle/optim.py": "tests/test_optim.py tests/test_training.py",
    "needle/safetensors.py": "tests/test_hostile_files.py tests/test_save.py tests/test_hf.py",
    "needle/sampling.py": "tests/test_generate.py",
    "needle/training.py": "tests/test_training.py",
    "apps/": "tests/apps",
    "apps/generate.py": "tests/apps/test_train_stops.py tests/apps/test_train.py",
    "apps/recipes.py": "tests/apps/test_recipe.py",
    "apps/run_folder.py": "tests/apps/test_survival.py tests/apps/test_train.py",
    "apps/run_init.py": "tests/apps/test_run_init.py",
    "apps/run_length.py": "tests/apps/test_run_length.py",
    "apps/run_log.py": "tests/apps/test_run_log.py tests/apps/test_loop.py",
    "apps/trackers.py": "tests/apps/test_trackers.py",
    "apps/train_flags.py": "tests/apps/test_recipe.py tests/apps/test_train.py",
    "building/": "tests/house/test_build.py",
    "checkout.py": "tests/house/test_checkout.py",
    "setup.py": "tests/house/test_build.py",
}

# Of the sample, what no test can see: file, a text of the planted lines, why.
LIVES = [
    (
        "apps/run_length.py",
        "MEASURED = 1.0",
        "changes nothing that is promised: how long a step is measured before a run of 3 minutes",
    ),
    (
        "apps/train_pythia.py",
        '"cuda": 1 * 19}',
        "the size of an evaluation on a GPU, a setting: how many of the held-out tokens it reads",
    ),
    (
        "needle/__init__.py",
        "file.read( 8191)",
        "changes nothing: the first processor is described in the first 2 KiB of /proc/cpuinfo",
    ),
]


def tests_of(file: str) -> str:
    return TESTS[max((start for start in TESTS if file.startswith(start)), key=len)]


def wider(file: str) -> str:
    """The rest of the suite, but for the campaign and what knows no Python module."""
    if not file.startswith(("needle/", "apps/")):
        return "tests/house"
    return "tests --ignore tests/csrc --ignore tests/house --ignore tests/test_campaign.py"


class Unannotated(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        return self.generic_visit(node)


def meaning(source: str) -> str | None:
    """The program without its annotations; None for what is no Python."""
    try:
        return ast.dump(Unannotated().visit(ast.parse(source)))
    except SyntaxError:
        return None


def changes(source: str) -> dict[tuple[int, int], list]:
    """Place -> the changes that cosmic-ray can make there: operator and its occurrence."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    found = defaultdict(list)
    for name in sorted(operator_names()):
        if name == "core/NoOp" or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            found[place[0]].append((operator, occurrence))
    return found


def as_fault(file: str, source: str, changed: str) -> Fault:
    """The lines that differ, with as many before them as make them stand once."""
    old, new = source.splitlines(True), changed.splitlines(True)
    first = next(i for i, (a, b) in enumerate(zip(old, new)) if a != b)
    after = next(i for i, (a, b) in enumerate(zip(old[::-1], new[::-1])) if a != b)
    after = min(after, len(old) - first - 1, len(new) - first - 1)
    while source.count("".join(old[first : len(old) - after])) != 1:
        first -= 1
    text, into = ("".join(lines[first : len(lines) - after]) for lines in (old, new))
    if file == "needle/lm_eval.py" and None in map(find_spec, ("lm_eval", "torch", "accelerate")):
        why = "undecided here: its tests need packages that are missing (pip install .[parity])"
        return Fault(file, text, into, tests_of(file), why)
    lives = [why for where, planted, why in LIVES if where == file and planted in into]
    return Fault(file, text, into, tests_of(file), "".join(lives))


def draw(file: str, source: str, count: int) -> list[Fault]:
    from cosmic_ray.mutating import mutate_code

    rng = random.Random(f"{SEED} {file}")
    found, faults = changes(source), []
    for place in rng.sample(sorted(found), len(found)):
        operator, occurrence = rng.choice(found[place])
        try:
            changed = mutate_code(source, operator, occurrence)
        except AttributeError:  # cosmic-ray does not know an exception with a dot in its name
            continue
        if meaning(changed) not in (None, meaning(source)):
            faults.append(as_fault(file, source, changed))
        if len(faults) == count:
            break
    return faults


def sample(root: Path) -> list[Fault]:
    try:
        import cosmic_ray.plugins  # noqa: F401
    except ImportError:
        raise ListError("the sample is cosmic-ray's: pip install cosmic-ray") from None
    paths = sorted({path for pattern in SOURCES for path in root.glob(pattern)})
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
    lines = {file: source.count("\n") for file, source in sources.items()}
    a_fault = sum(lines.values()) / TOTAL
    return [
        fault
        for file, source in sources.items()
        for fault in draw(file, source, max(1, round(lines[file] / a_fault)))
    ]
