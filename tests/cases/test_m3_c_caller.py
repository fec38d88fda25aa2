"""M3: a C program uses an artifact; its symbols are the ABI's and nothing of C++ or Python is needed."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest

from coda.build.host import header
from coda.frontend import load_path
from coda.target import lower
from tests.abi import harness

EXAMPLES = Path(__file__).parents[2] / "examples"
CALLER = Path(__file__).parents[1] / "abi" / "caller.c"
FUNCTIONS = ("run", "check", "workspace_bytes", "warmup")


def test_c_program_checks_tensors(tmp_path: Path) -> None:
    library = harness.library("plain")
    caller = tmp_path / "caller"
    compiler = shutil.which("gcc") or pytest.skip("no C compiler")
    harness.run(
        [compiler, "-std=c11", "-Wall", "-Werror", "-pedantic", f"-I{library.parent}", CALLER, library, "-o", caller]
    )
    lines = harness.run([caller], env={"LD_LIBRARY_PATH": str(library.parent)}).splitlines()
    assert lines == [
        "0 ",
        "0 ",
        "0 ",
        "1 operand 'w' has shape [256, 640]: dim 1 must be 512 (K, fixed by 'x')",
        "1 operand 'x' has rows 1020 bytes apart; TMA needs a multiple of 16",
        "1 operand 'x' is f32, the program declares bf16[M, K]",
        "1 'plain' takes 3 arguments (x, w, out), got 0",
    ]


def test_exported_symbols_are_the_abi() -> None:
    exported = {
        line.split()[-1] for line in harness.run(["nm", "-D", "--defined-only", harness.library("stats")]).splitlines()
    }
    assert exported == {*(f"stats_{f}" for f in FUNCTIONS), "coda_describe", "coda_last_error"}


def test_only_libc_is_linked() -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", harness.run(["readelf", "-d", harness.library("stats")]))
    assert needed
    assert all(re.fullmatch(r"(lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux-x86-64\.so\.2)", n) for n in needed), needed


def test_header_compiles_as_c_and_cxx_after_a_real_dlpack(tmp_path: Path) -> None:
    library = harness.library("plain")
    real = harness.torch_include() / "ATen" / "dlpack.h"
    for compiler, language in (("gcc", "c"), ("g++", "c++")):
        source = tmp_path / f"use.{'c' if language == 'c' else 'cpp'}"
        source.write_text(
            f'#include "{real}"\n#include "plain.h"\nint main(void) {{ return plain_check(0, 0) == CODA_OK; }}\n'
        )
        flags = ["-fsyntax-only", "-Wall", "-Werror", f"-I{library.parent}"]
        harness.run([shutil.which(compiler) or pytest.skip("no compiler"), *flags, source])


def test_dltensor_has_the_layout_of_dlpack() -> None:
    from coda.runtime.dlpack import DLTensor

    assert ctypes.sizeof(DLTensor) == 48
    offsets = {name: getattr(DLTensor, name).offset for name, _ in DLTensor._fields_}
    assert (offsets["data"], offsets["device_type"], offsets["ndim"], offsets["code"]) == (0, 8, 16, 20)
    assert (offsets["shape"], offsets["strides"], offsets["byte_offset"]) == (24, 32, 40)


def test_example_compiles(tmp_path: Path) -> None:
    plan = lower(load_path(EXAMPLES / "linear.coda").programs["linear"])
    (tmp_path / "linear.h").write_text(header("linear", [plan]))
    flags = [
        "-std=c11",
        "-Wall",
        "-Werror",
        "-fsyntax-only",
        f"-I{tmp_path}",
        f"-isystem{harness.tools().cuda_include}",
    ]
    harness.run([shutil.which("gcc") or pytest.skip("no C compiler"), *flags, EXAMPLES / "c" / "main.c"])
