"""Which parts a rank runs; one that hangs is killed, and named by what it tried. (One that dies:
test_machine.py.)"""

import os
import time

import pytest
from harness import naming, wait_until_gone

from needle.diagnose import __main__ as program
from needle.diagnose import facts, parts
from needle.distributed import environment
from needle.distributed.environment import Place

pytestmark = pytest.mark.slow
PROGRAM = r"""
import os, signal
print("... gelu float32")
os.fork()
os.write(1, b"pid %d\n" % os.getpid())
signal.pause()
"""


def test_hang_is_killed_at_its_deadline_with_what_it_started(monkeypatch):
    monkeypatch.setattr(parts, "CODE", PROGRAM)
    start, lines = time.monotonic(), []
    failures, told = parts.run("cuda()", "device", seconds=2, say=lines.append)
    assert 2 <= time.monotonic() - start < 20 and (failures, told) == (1, None)
    assert "FAILED: gelu float32 hangs: killed after 2 s" in lines[-1]
    assert "nvidia-smi --gpu-reset" in lines[-1] and len(lines) == 3
    for line in lines[:2]:
        wait_until_gone(int(line.split()[1]))


def test_part_that_ends_with_an_error_is_a_failure(monkeypatch):
    code = "import os; print('... gelu float32'); os.write(1, b'\\xff\\n\\n'); "
    code += "print('half a line', end=''); raise SystemExit(3)"
    monkeypatch.setattr(parts, "CODE", code)
    lines: list[str] = []
    assert parts.run("cuda()", "device", seconds=60, say=lines.append) == (1, None)
    assert lines[:-1] == ["\ufffd", "half a line"]
    assert "FAILED: its process ended with 3 at gelu float32" in lines[-1]


def test_error_of_a_part_is_a_line_and_a_traceback_where_nobody_expects_it():
    for words, said, is_expected in (
        (["server", "ftp://a"], "GET ftp://a/health: ValueError: it must begin", True),
        (["server", "http://127.0.0.1:1"], ":1/health: ConnectionRefusedError: ", True),
        (["folder"], "its start: TypeError: examine() missing", False),
    ):
        with naming(said):
            lines: list[str] = []
            assert parts.run("part", *words, seconds=60, say=lines.append) == (1, None)
            assert said in lines[-1] and (len(lines) == 1) == is_expected
            assert is_expected or lines[0].startswith("Traceback")


def test_facts_that_fail_end_nothing_and_are_heard_of_each_rank(monkeypatch):
    """nvidia-smi may show GPUs that CUDA does not count."""
    begun, said = [], []

    def run(label, part, *words, say, **more):
        begun.append((label, more["seconds"]))
        for line in ("cuda() fine", "cuda() FAILED: lost") if part == "facts" else ():
            say(line)
        return part == "facts", None

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program.shutil, "which", lambda name: "/bin/nvidia-smi")
    args = program.parser().parse_args(["--run", "runs/a"])
    for rank, heard in (0, ["cuda() fine", "cuda() FAILED: lost"]), (1, ["cuda() FAILED: lost"]):
        assert program.examine(args, Place(rank, 2, rank, 2, "torchrun"), said.append) == 1
        assert said == heard and ("cpu()", 60.0) in begun
        assert (("GPUs", 60.0) in begun) == (("run", 600.0) in begun) == (rank == 0)
        begun.clear()
        said.clear()


def test_variables_of_a_part_go_before_those_of_the_user(monkeypatch):
    monkeypatch.setenv("NEEDLE_TRACE", "1")
    monkeypatch.setattr(parts, "CODE", "import os; print(os.environ['NEEDLE_TRACE'])")
    lines = []
    parts.run("a", "b", seconds=60.0, say=lines.append, NEEDLE_TRACE="0")
    assert lines == ["0"]


def test_text_of_several_lines_is_shown_in_one(capsys):
    parts.failed("cuda()", "it says:\n  two\nlines.", "mend it")
    assert capsys.readouterr().out == (
        "cuda()         FAILED: it says:   two lines. To mend it: mend it\n"
    )


def test_ops_are_compared_as_they_compute_by_default_and_with_full_for_longer(monkeypatch):
    given, told = [], {"count": 0, "chosen": []}
    run = lambda label, part, *words, **more: given.append((part, *words, more)) or (0, told)
    monkeypatch.setattr(program, "run", run)
    for words, is_full, seconds in ([], "0", 60.0), (["--full"], "1", 600.0):
        program.examine(program.parser().parse_args(words), None, print)
        part, _, full, more = next(one for one in given if one[0] == "device")
        wanted = {"NEEDLE_TF32": "0", "NEEDLE_TRACE": "0", "seconds": seconds}
        assert (full, {name: more.get(name) for name in wanted}) == (is_full, wanted)
        given.clear()


def test_rank_whose_launcher_shows_it_one_gpu_takes_that(monkeypatch, capsys):
    """With --device 1 it is a failure: CUDA numbers that GPU 0."""
    monkeypatch.setattr(facts, "gpus", lambda: ["cuda()"])
    monkeypatch.setattr(facts, "cuda", lambda: {"built": False, "driver": None, "usable": True})
    for is_asked, chosen in ("0", '["cuda()"]'), ("1", "[]"):
        facts.examine("1", is_asked)
        told = capsys.readouterr().out
        assert told.endswith(f'=== {{"count": 1, "chosen": {chosen}}}\n')
        assert ("FAILED: there is no cuda(1): CUDA shows cuda()" in told) == (is_asked == "1")


@pytest.mark.parametrize("built, driver", [(True, "13.0"), (True, None), (False, "13.0")])
def test_gpu_that_cannot_be_used_fails_where_backend_and_driver_are_there(
    monkeypatch, capsys, built, driver
):
    monkeypatch.setenv("NEEDLE_REQUIRE_CUDA", "0")
    found = {"built": built, "driver": driver, "usable": False, "problem": "it is lost"}
    monkeypatch.setattr(facts, "cuda", lambda: found)
    facts.examine("", "0")
    said = capsys.readouterr().out
    assert ("cuda()         FAILED: it is lost" in said) == (built and driver is not None)


def test_threads_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    for value, told in ("", "3"), ("7", "7 (OMP_NUM_THREADS)"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert facts.collect()["threads"] == told


def test_settings_are_those_of_needle_and_its_libraries(monkeypatch):
    libraries = "NEEDLE", "OPENBLAS", "OMP", "CUDA", "CUBLAS", "CUBLASLT"
    names = [f"{library}_A" for library in libraries]
    for name in *names, "MY_CUDA_A":
        monkeypatch.setenv(name, "1")
    found = facts.collect()
    assert {name for name in found["settings"] if name.endswith("_A")} == {*names}
    for debug in False, True:
        found["build"]["debug"] = debug
        built = dict(facts.rows(found))["built with"]
        assert built.endswith(", a debug build: indices are checked") == debug


def test_launcher_that_contradicts_itself_is_a_bad_call(monkeypatch, capsys):
    find = environment.find
    monkeypatch.setattr(environment, "find", lambda: find({"RANK": "1"}))
    with pytest.raises(SystemExit, match="2"):
        program.main([])
    assert "RANK=1, but WORLD_SIZE is not set" in capsys.readouterr().err


def test_parts_of_a_rank_follow_its_place(monkeypatch):
    """Each examines its device, the first of a machine its GPUs, rank 0 a run and a service."""
    args = program.parser().parse_args(["--run", "runs/a", "--server", "http://a"])
    begun, told = [], {"count": 2, "chosen": ["cuda()"]}
    run = lambda label, part, *words, **more: begun.append(part) or (0, told)
    monkeypatch.setattr(program, "run", run)
    for rank, local, wanted in (
        (0, 0, "facts device gpus ranks folder server"),
        (1, 1, "facts device ranks"),
        (2, 0, "facts device gpus ranks"),
    ):
        begun.clear()
        assert program.examine(args, Place(rank, 4, local, 2, "torchrun"), print) == 0
        assert begun == wanted.split()
