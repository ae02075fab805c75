"""The documents do what they say: examples run, commands parse, links lead somewhere, and a traced
training step passes the stops of docs/walk.md."""

import ast
import contextlib
import dataclasses
import hashlib
import html
import inspect
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import sys

import numpy as np
import pytest
import train_pythia
from harness import PACKAGE, ROOT, WITHOUT_PLOTS, run, small_pythia
from sources import C_FILES, PY_FILES

import needle
from building import reference
from needle.command import COMMANDS
from needle.training import run as run_parts

PATHS = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
# Pages whose Python examples run on a CPU, in order, as one program.
RUNNABLE = ["README.md", "docs/training.md", "docs/replay.md", "docs/interpretability.md"]
RUNNABLE += ["docs/attention.md"]
WORDS = "|".join(f"{word} " for word in COMMANDS)
COMMAND = rf"(?:python|(?<=[`\n ])needle) ((?:apps/|benchmarks/|{WORDS})[^`\n|]*)"


@pytest.mark.parametrize("page", RUNNABLE)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", WITHOUT_PLOTS + PATHS)
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks, page
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})


TUTORIALS = ["train", "patching", "dynamics", "own_op", "transformers"]
TUTORIALS += ["memorisation", "rule", "bank"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorials_run(name, tmp_path):
    """The code cells of each notebook, one after another."""
    notebook = ROOT / f"docs/tutorials/{name}.ipynb"
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    if "pyplot" in code:  # its own figures are drawn, not those of the runs that it starts
        code = f"""from matplotlib import pyplot
import os
os.environ["PYTHONPATH"] = {WITHOUT_PLOTS + PATHS!r}
{code}"""
    settings = {"MPLBACKEND": "Agg", "NEEDLE_CACHE": tmp_path / "cache", "PYTHONPATH": PATHS}
    done = run(sys.executable, "-c", code, cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorials_have_the_outputs_of_their_code(name):
    """`make tutorials` makes them, without paths, addresses and times of the machine."""
    notebook = json.loads((ROOT / f"docs/tutorials/{name}.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    made_of = notebook["metadata"]["outputs_of"]
    assert made_of == hashlib.sha256(code.encode()).hexdigest(), "make tutorials"
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    figures = sum("image/png" in output.get("data", ()) for output in outputs)
    assert bool(figures) == ("pyplot" in code)
    for cell in cells:
        assert cell["outputs"] or "print(" not in "".join(cell["source"])
    for output in outputs:
        text = "".join(output["text"] if "text" in output else output["data"]["text/plain"])
        assert text and not re.search(r"(^|[ '\"])/\w|0x[0-9a-f]{6}|it/s|\d:\d\d\b", text), text


def test_tutorials_are_listed():
    names = {path.stem for path in (ROOT / "docs/tutorials").glob("*.ipynb")}
    assert names == set(re.findall(r"tutorials/(\w+)\.ipynb", (ROOT / "mkdocs.yml").read_text()))


def test_links_lead_to_files_and_headings():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
                anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
                assert anchor in anchors, f"{page.name}: {target}"


def printed(monkeypatch, *words: str, code=0, program=PACKAGE / "__main__.py") -> str:
    """Return what a command of `needle`, or a program, prints before it ends so, run in this
    process: an error is what stderr gets."""
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    out, shown = io.StringIO(), contextlib.redirect_stderr if code else contextlib.redirect_stdout
    with shown(out), pytest.raises(SystemExit) as end:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert (end.value.code or 0) == code, words
    return out.getvalue()


def test_commands_have_the_flags_they_are_shown_with(monkeypatch):
    """`--flag` of a command in a document is in that program's help, and none is missing. The help
    of each word of `needle` names it and fits 80 columns."""
    programs: dict[str, str] = {}
    monkeypatch.setenv("COLUMNS", "80")
    texts = {page.name: page.read_text().replace("\\\n", " ") for page in PAGES}
    texts["needle --help"] = "".join(f"`needle {word} `" for word in COMMANDS)
    for page, text in texts.items():
        for command in re.findall(COMMAND, text):
            words = shlex.split(re.split(r" -- | #", command)[0])
            parts = words[: 1 + (words[0] == "data")]
            if words[0] == "lm_eval":  # a program of another package
                continue
            name = " ".join(parts)
            if name not in programs:
                asked = ["--help", "all"] if "train" in name else ["--help"]
                if words[0] in COMMANDS:
                    shown = printed(monkeypatch, *parts, *asked)
                    assert not [line for line in shown.split("\n") if len(line) > 80], name
                    assert shown.startswith(f"usage: needle {name}")
                else:
                    shown = printed(monkeypatch, *asked, program=ROOT / name)
                programs[name] = shown
            for flag in (word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)):
                assert flag in programs[name], f"{page}: {name} has no {flag}"
            if len(words) > len(parts):  # it is shown with arguments
                needed = re.split(r"\n\n|;", programs[name])[0]
                for _ in range(2):  # brackets within brackets
                    needed = re.sub(r"\[[^][]*\]", "", needed)
                for flag in re.findall(r"--[a-z-]+", needed):
                    assert flag in words, f"{page}: {name} needs {flag}"


def test_the_command_lists_and_runs_its_programs(tmp_path, monkeypatch):
    listed = printed(monkeypatch)
    assert len(listed.splitlines()) < 24
    for word, (_, about) in COMMANDS.items():
        assert f"  {word} " in listed and about in listed
    wrong = printed(monkeypatch, "trian", "--steps", "3", code=2)
    assert wrong == "needle: no command 'trian'; there is train (needle --help)\n"
    missing = printed(monkeypatch, "plot", str(tmp_path / "x"), code=1)
    assert f"{tmp_path / 'x'}: no step yet" in missing
    assert printed(monkeypatch, "-h") == printed(monkeypatch, "help") == listed
    for word in "-V", "--version":
        assert printed(monkeypatch, word) == f"needle {needle.__version__}\n"


def called_in_a_step(argv: list[str]) -> set[str]:
    """Train. Return what is called from the first micro-batch to the update of the weights, by file
    and function; what follows samples text."""
    called, inside = set(), False

    def note(frame, event, argument) -> None:
        nonlocal inside
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        inside = inside or name == "forward_backward"
        if event == "c_call" and inside:
            called.add("_C." + argument.__name__)
        elif event == "call" and (inside or name == "train"):
            called.add(f"{file.removeprefix(f'{PACKAGE.parent}/').removeprefix(f'{ROOT}/')} {name}")
        elif event == "return" and name == "step" and file.endswith("/data_parallel.py"):
            inside = False

    sys.setprofile(note)
    try:
        assert train_pythia.main(argv) == 0
    finally:
        sys.setprofile(None)
    return called


def test_walk_is_followed_by_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_parts, "plot", lambda folder: "no plot")
    words = f"--steps 1 --device cpu --data {ROOT}/docs/walk.md --out {tmp_path} --model tiny"
    called = called_in_a_step([*words.split(), "--batch-size", "2", "--eval-every", "0"])
    text = (ROOT / "docs" / "walk.md").read_text().partition("## The tree")[0]
    stops = re.findall(r"^\d+\. `([\w/.]+)`: (.*?)(?=^\d+\. |\Z)", text, re.M | re.S)
    assert len(stops) == 17
    for file, said in stops:
        names = re.findall(r"`((?:_C\.)?\w+)`", said)
        assert names, file
        for name in names:
            if name.startswith("_C."):
                assert name in called, f"{file}: {name} did not run"
            elif file.endswith(".py"):
                assert f"{file} {name}" in called, f"{file}: {name} was not called"
            else:
                assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{file}: no {name}"


FORWARD = """
set breakpoint pending on
break cpu_attention_fwd
run
backtrace
"""
BACKWARD = """
set breakpoint pending on
break weight_grad
run
delete
break cpu_matmul_acc
continue
backtrace
"""
STEP = """
from harness import small_pythia
import numpy as np
model, ids = small_pythia(), np.zeros((1, 9), int)
model.loss(ids[:, :-1], ids[:, 1:]).backward()
"""


@pytest.mark.parametrize(
    "kernel, commands, most", [("cpu_attention_fwd", FORWARD, 8), ("cpu_matmul_acc", BACKWARD, 10)]
)
def test_walk_names_the_functions_from_a_layer_to_a_kernel(tmp_path, kernel, commands, most):
    if shutil.which("gdb") is None:
        pytest.skip("needle: no gdb")
    (tmp_path / "break").write_text(commands)
    paths = os.pathsep.join([str(PACKAGE.parent), str(ROOT / "tests")])
    words = ["gdb", "-q", "-batch", "-x", tmp_path / "break", "--args", sys.executable, "-c", STEP]
    shown = run(*words, PYTHONPATH=paths, DEBUGINFOD_URLS="").stdout
    if re.search(r"Breakpoint 1[.\d]*, ", shown) is None:
        pytest.skip("needle: gdb starts no program here: " + shown[-200:])
    frames = re.findall(r"^#\d+ .*?(\w+) \(.*\) at (csrc/\S+):\d+$", shown, re.M)
    (last, _), *path = frames
    assert last == kernel and 5 <= len(path) <= most, shown
    text = (ROOT / "docs" / "walk.md").read_text().partition("## The tree")[0]
    made = {"py_layer_fwd", "py_layer_bwd", kernel.replace("cpu_", "dispatch_")}  # by macros
    for name, file in path:
        assert f"`{name}`" in text or name in made, shown
        assert f"`{file}`" in text, shown
    assert len({file for name, file in path if name not in made}) <= 4, shown


def test_reference_names_what_exists_and_each_family_of_ops():
    text = (ROOT / "docs/api.md").read_text()
    blocks = re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*?)\])?", text, re.M)
    for name, members in blocks:
        found = pkgutil.resolve_name(name)
        for member in filter(None, members.split(", ")):
            assert hasattr(found, member), f"{name} has no {member}"
    functions = (getattr(needle.ops, name) for name in needle.ops.__all__)
    families = {f.__module__ for f in functions if inspect.isfunction(f)}
    assert families <= {name for name, _ in blocks}
    folder, shown = ROOT / "needle" / "ops", set()
    for path in folder.glob("[a-z]*.py"):
        words = path.read_text(), path.stem, (folder / "spellings.py").read_text()
        shown |= {*ast.literal_eval(reference.with_exports(*words).rpartition("__all__ = ")[2])}
    assert {"exp", "gelu", "softmax"} <= shown and not {"row", "as_floats", "_round"} & shown


def test_examples_of_docstrings_render_as_code():
    markdown = pytest.importorskip("markdown", reason="needle: no package markdown")
    shown = 0
    for path in (ROOT / "needle").rglob("*.py"):
        written, read = (ast.parse(f(path.read_text())) for f in (str, reference.fenced))
        for node, made in zip(ast.walk(written), ast.walk(read), strict=True):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                continue
            text = ast.get_docstring(node) or ""
            if ">" not in text:  # neither a prompt nor a quotation
                continue
            page = markdown.markdown(ast.get_docstring(made), extensions=["fenced_code"])
            code = html.unescape("\n".join(re.findall(r"<code.*?>(.*?)</code>", page, re.S)))
            prompts = re.findall("^>>> .*", text, re.M)
            assert re.findall("^>>> .*", code, re.M) == prompts, f"{path}: {text}"
            assert "<blockquote>" not in page, f"{path}: {text}"
            shown += len(prompts)
    assert shown > 200


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    text = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\|\n)+", text, re.M)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_fields_of_a_config_are_in_the_table_of_models():
    table = rows("docs/models.md", "A shape")
    listed = [(row[0].strip("`"), ast.literal_eval(row[1])) for row in table]
    fields = dataclasses.fields(needle.PythiaConfig)
    assert listed == [(field.name, field.default) for field in fields]


def test_variables_of_the_page_are_those_that_are_read():
    text = "".join(path.read_text() for path in (*PY_FILES, *C_FILES, ROOT / "Makefile"))
    page = set(re.findall("NEEDLE_[A-Z0-9_]+", (ROOT / "docs/environment.md").read_text()))
    assert set(re.findall('"(NEEDLE_[A-Z0-9_]+)"', text)) - page == set()
    assert page - set(re.findall("NEEDLE_[A-Z0-9_]+", text)) == set()


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning")
def test_an_export_opens_in_transformer_lens_as_shown(tmp_path):
    pytest.importorskip("transformer_lens", reason="transformer_lens is not installed")
    import torch

    model = small_pythia()
    model.save_pretrained(tmp_path)
    page = (ROOT / "docs/models.md").read_text()
    names: dict = {}
    shown = re.search(r"^```\n(from transformer_lens.*?)^```", page, re.M | re.S)[1]
    exec(shown.replace("FOLDER", str(tmp_path)), names)
    ids = np.arange(12).reshape(1, 12)
    theirs = names["model"](torch.from_numpy(ids)).detach().numpy()
    np.testing.assert_allclose(theirs, model(ids)[0].numpy(), atol=1e-4)
