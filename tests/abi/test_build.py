"""One example through the real compilers: what is built, what is reported, and that it is built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda.build import artifact, build
from coda.build.compile import parse_ptxas
from coda.frontend import load_path
from tests.abi import harness

LINEAR = Path(__file__).parents[2] / "examples" / "linear.coda"


@pytest.mark.slow
def test_build_once_and_copy_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.tools()
    monkeypatch.setenv("CODA_CACHE", str(tmp_path / "cache"))
    program, said = load_path(LINEAR).programs["linear"], list[str]()
    built = artifact(program, {"M": 64, "N": 64, "K": 64}, "128x128", said.append)
    assert said[0] == "compiling linear_gemm_128x128.cu for sm_90a"
    assert "linear_gemm_128x128: 168 registers" in said[1]
    (kernel,) = parse_ptxas((built.path.parent / "linear_gemm_128x128.log").read_text())
    assert kernel.spill_bytes == 0

    said.clear()
    out = build(program, "128x128", tmp_path / "out" / "mine.so", tmp_path / "sources", progress=said.append)
    assert said == []  # from the cache
    assert sorted(p.name for p in out.parent.iterdir()) == ["mine.h", "mine.so"]
    assert {"linear_gemm_128x128.cu", "host.cpp", "linear.h"} <= {p.name for p in (tmp_path / "sources").iterdir()}
    assert out.read_bytes() == built.path.read_bytes()
