"""One artifact with several programs: forward and derived backward, as ``coda lower`` makes it of a config."""

from __future__ import annotations

from pathlib import Path

import pytest

import coda
from coda import build
from coda.build.compile import CUBIN
from coda.cli import main
from coda.errors import CodaError
from tests.abi import harness

CONFIG = """
program = "p.coda"
backward = true
[dims]
M = 64
N = 64
K = 64
"""
PROGRAM = "program layer(x: bf16[M, K], w: bf16[N, K], b: bf16[N]?) { return y = gelu_tanh(x @ w.T + b): bf16 }"


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``layer.so``, the launcher real and the device code a stub: nothing here runs on a GPU."""
    harness.tools()
    monkeypatch.setenv("CODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compile_unit", lambda folder, *rest: _stub(folder))
    (tmp_path / "p.coda").write_text(PROGRAM)
    (tmp_path / "layer.toml").write_text(CONFIG)
    out = tmp_path / "layer.so"
    assert main(["lower", str(tmp_path / "layer.toml"), "-o", str(out)]) == 0
    return out


def _stub(folder: Path) -> None:
    (folder / CUBIN).write_bytes(b"no device code")
    (folder / "build.log").write_text("")


def test_each_program_is_found_by_its_name(artifact, capsys):
    forward, backward = (build.load(artifact, name) for name in ("layer", "layer_backward"))
    assert [a["name"] for a in forward.args][:4] == ["x", "w", "b", "y"] and len(forward.args) == 5  # keeps one
    assert [a["name"] for a in backward.args if a["output"]] == ["d_x", "d_w", "d_b"]
    assert backward.program.name == "layer_backward"
    with pytest.raises(CodaError, match="has the programs layer, layer_backward"):
        coda.load(artifact)
    assert coda.load(artifact, program="layer").program.name == "layer"
    assert main(["run", str(artifact), "--program", "layer_backward", "--small", "--device", "cpu"]) == 0
    assert "layer_backward at" in capsys.readouterr().out


def test_the_header_and_the_symbols_are_those_of_both(artifact):
    header = artifact.with_suffix(".h").read_text()
    symbols = harness.run(["nm", "-D", "--defined-only", artifact])
    for name in ("layer", "layer_backward"):
        for function in ("run", "check", "workspace_bytes", "warmup"):
            assert f"{name}_{function}(" in header and f" {name}_{function}\n" in symbols
    assert symbols.count(" coda_describe\n") == 1
