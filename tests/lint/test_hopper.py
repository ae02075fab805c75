"""The machine code of the Hopper kernels: their products are those of wgmma, and the compiler makes
none of them wait for another. Needs nvcc, and no GPU."""

import struct

import pytest
from harness import ROOT, run

from building import choices

pytestmark = pytest.mark.slow

TOOLKIT = choices.find_toolkit()
# HGMMA with A in shared memory, in registers, QGMMA: bits 0 to 11 of an instruction.
SHARED, REGISTERS, BYTES = 0x9F0, 0xDF0, 0x9F3


def words_of(code: bytes) -> list[int]:
    """Return the lower halves of the instructions of all functions, 16 bytes each, from the ELF
    sections .text.NAME."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names_at = struct.unpack_from("<HHH", code, 58)
    sections = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    names = sections[names_at][4]
    return [
        int.from_bytes(code[at : at + 8], "little")
        for name, _, _, _, offset, length in sections
        if code[names + name :].startswith(b".text.")
        for at in range(offset, offset + length, 16)
    ]


KINDS = {
    "attention_fwd_hopper": (SHARED, REGISTERS),
    "attention_bwd_hopper": (SHARED, REGISTERS),
    "linear_hopper": (SHARED,),
    "linear_shallow_hopper": (REGISTERS,),
    "cross_entropy_fp8": (BYTES,),
    "linear_gelu_fp8": (BYTES,),
}


def test_each_file_of_products_is_among_them():
    texts = {path.stem: path.read_text() for path in ROOT.glob("cuda/*.cu")}
    assert {name for name in texts if "using namespace hopper;" in texts[name]} == KINDS.keys()


@pytest.mark.skipif(isinstance(TOOLKIT, str), reason=f"no nvcc: {TOOLKIT}")
@pytest.mark.parametrize("source, kinds", KINDS.items())
def test_products_are_wgmma(source, kinds, tmp_path):
    out = tmp_path / "code.cubin"
    command = [str(TOOLKIT.nvcc), "-std=c++17", "-O3", "-Icsrc", "-Icuda", "-DNEEDLE_HOPPER"]
    command += [f"-I{path}" for path in TOOLKIT.include]
    command += ["-Werror", "all-warnings", "-cubin", "-arch=sm_90a", "-Xptxas", "-v"]
    done = run(*command, "-o", str(out), f"cuda/{source}.cu")
    assert done.returncode == 0, done.stderr
    # C75xx: products that wait for each other, register counts that are ignored.
    assert "(C75" not in done.stderr, done.stderr
    words = words_of(out.read_bytes())
    found = [sum((word & 0xFFF) == kind for word in words) for kind in kinds]
    assert all(found), f"{len(words)} instructions, wgmma of {kinds}: {found}"
