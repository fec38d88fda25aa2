"""M4: a tile outside the proven list is refused before any compiler runs; a failing compile is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda.build import compile as compiling
from coda.build import variants_of
from coda.errors import CodaError
from coda.target.legality import legal_tile
from coda.target.plan import TILES, Tile
from tests.abi import harness

SPILLING = """\
ptxas info    : Compiling entry function 'p_gemm' for 'sm_90a'
    24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_tile_of_the_case() -> None:
    with pytest.raises(CodaError, match=r"tile 128x112 is not one of 128x128, 128x160, 128x192, 128x256_coop"):
        variants_of(harness.plan("plain"), [Tile(128, 112)])
    assert str(legal_tile(Tile(128, 128, cluster_m=4))) == "cluster 4x1 is not one of 1x1, 2x1"
    assert all(map(legal_tile, TILES))


def test_failing_compile_is_one_line_and_a_log(tmp_path: Path) -> None:
    (tmp_path / "host.cpp").write_text("int f() { return undeclared; }\n")
    with pytest.raises(CodaError) as error:
        compiling.compile_host(tmp_path, harness.tools())
    message, hint = error.value.diagnostics[0].message, error.value.diagnostics[0].hint
    assert message.startswith("the launcher does not compile: host.cpp:1:")
    assert "\n" not in message
    log = tmp_path / "build.log"
    assert hint == f"the whole log is {log}"
    assert "undeclared" in log.read_text()


def test_ptxas_reports_are_read() -> None:
    (kernel,) = compiling.parse_ptxas(SPILLING)
    assert (kernel.symbol, kernel.registers, kernel.spill_bytes) == ("p_gemm", 168, 36)


def test_serialised_wgmma_is_an_error() -> None:
    line = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    assert compiling._FATAL.search(line)
    assert not compiling._FATAL.search("ptxas info : (C7511) something else")


def test_local_memory_between_wgmmas_rejects_a_kernel() -> None:
    def sass(*instructions: str) -> str:
        return "Function : p_gemm\n" + "\n".join(f"  /*0000*/  {i} ;" for i in instructions)

    inside = sass("HGMMA.64x128x16.F32.BF16 R24", "STL [R1], R2", "HGMMA.64x128x16.F32.BF16 R24")
    outside = sass("STL [R1], R2", "HGMMA.64x128x16.F32.BF16 R24", "HGMMA.64x128x16.F32.BF16 R24", "LDL R2, [R1]")
    assert compiling.find_local_memory(inside) == "p_gemm"
    assert compiling.find_local_memory(outside) is None
