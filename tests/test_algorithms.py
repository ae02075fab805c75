"""The table of algorithms (cuda/algorithms.def): which answer a product takes, the warning where it
was made for another version of cuBLASLt, and how benchmarks/algorithms.py writes it."""

import sys

import algorithms
import pytest
from harness import ROOT, fake_gpus, run

TABLE = algorithms.TABLE.read_text()
LISTED = (32768, 1536, 512, 0, 0, "BF16", 1, 0, 0)
LOOKUP = """
#include "algorithms.cuh"
int main() {
    algorithms::Product product = {32768, 1536, 512, 0, 0, ND_BF16, 1, 0, 0};
    for (int version : {130100, 130200}) {
        for (const char *gpu : {"NVIDIA H200", "NVIDIA H100"}) {
            char text[384];
            algorithms::warning(gpu, version, text, sizeof text);
            printf("%d|%s\\n", algorithms::answer_for(gpu, version, product), text);
        }
    }
    product.scaled = 1;
    printf("%d\\n", algorithms::answer_for("NVIDIA H200", 130100, product));
}
"""


def test_lookup_takes_the_listed_answer_and_warns_of_another_version(tmp_path):
    (tmp_path / "lookup.cpp").write_text(LOOKUP)
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc", f"-I{ROOT}/cuda"]
    made = run("c++", *flags, "lookup.cpp", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    made_for, no_row, other, other_gpu, unlisted = run(tmp_path / "a.out").stdout.splitlines()
    answer = answers_of(TABLE, "NVIDIA H200", 130100)[LISTED]
    assert answer > 0 and made_for == f"{answer}|" and unlisted == "0"
    assert no_row == other_gpu == "0|"  # a GPU that the table does not list misses nothing
    for part in ("0|", "NVIDIA H200", "13.1.0", "13.2.0", "benchmarks/algorithms.py --write"):
        assert part in other


def test_a_devices_warning_is_printed_once(tmp_path):
    fake_gpus(tmp_path)
    code = "import needle\nfor i in (0, 1, 0): needle.cuda(i).properties()"
    facts = {"PYTHONPATH": tmp_path, "FAKE_GPUS": "2", "FAKE_WARNING": "the table is old"}
    done = run(sys.executable, "-c", code, cwd=tmp_path, **facts)
    assert (done.returncode, done.stderr) == (0, "needle: warning: the table is old\n")


def answers_of(table: str, gpu: str, version: int) -> dict:
    """The rows of a GPU and version."""
    found = {}
    for line in table.splitlines():
        if line.startswith(f'ALGORITHM("{gpu}", {version}, '):
            *product, answer = line.rstrip(")").split(", ")[2:]
            found[(*map(int, product[:5]), product[5], *map(int, product[6:]))] = int(answer)
    return found


@pytest.mark.parametrize(
    "first, other, answer",
    [((1.03, 1.03), (1, 1), 1), ((1.03, 1.01), (1, 1), 0), ((1, 1), (1.5, 1.5), 0)],
)
def test_an_answer_is_listed_if_it_wins_both_rounds(first, other, answer):
    assert algorithms.fastest([list(first), list(other)]) == answer


def test_answers_replace_the_rows_of_their_products_and_of_other_versions():
    gpu, product, other = "NVIDIA H200", LISTED, (*LISTED[:8], 1)
    rows = [
        algorithms.row(gpu, 130100, product, 3),
        algorithms.row(gpu, 130100, other, 4),
        algorithms.row(gpu, 130000, other, 5),
        algorithms.row("NVIDIA H100", 130000, product, 6),
    ]
    table = "\n".join(["// about", *rows, "#undef ALGORITHM", ""])
    for answer, new in (7, [algorithms.row(gpu, 130100, product, 7)]), (0, []):
        found = algorithms.renewed(table, gpu, 130100, {product: answer})
        lines = ["// about", rows[1], rows[3], *new, "#undef ALGORITHM"]
        assert found.splitlines() == lines and found.endswith("\n")
