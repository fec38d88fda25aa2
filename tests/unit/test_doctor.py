"""coda doctor on machines that lack this or that (case M2)."""

from __future__ import annotations

import json

import pytest

from coda.build import toolchain
from coda.cli import main
from coda.cli.doctor import examine
from coda.errors import CodaError


def findings() -> dict:
    return {f.name: f for f in examine()}


@pytest.fixture
def no_nvcc(monkeypatch):
    def missing():
        raise CodaError.of("nvcc was not found", "pip install it")

    monkeypatch.setattr(toolchain, "find_nvcc", missing)


def test_everything_looked_for_is_reported():
    wanted = {
        "coda",
        "grammar",
        "templates",
        "nvcc",
        "cuda runtime",
        "host compiler",
        "cutlass",
        "torch",
        "driver",
        "gpu",
    }
    assert set(findings()) == wanted


def test_a_missing_nvcc_has_a_fix_and_fails(no_nvcc, capsys):
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING  nvcc" in out
    assert "fix: pip install it" in out
    assert "reference interpreter works" in out


def test_json_has_a_fix_for_each_thing_missing(no_nvcc, capsys):
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert all(f["fix"] for f in report["findings"] if f["required"] and not f["ok"])


def test_a_wrong_cutlass_is_found(monkeypatch, tmp_path):
    header = tmp_path / "include/cutlass/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 2\n")
    monkeypatch.setenv("CODA_CUTLASS", str(tmp_path))
    cutlass = findings()["cutlass"]
    assert not cutlass.ok
    assert "3.9.2" in cutlass.found
    assert cutlass.fix


def test_a_missing_gpu_is_no_fault(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = findings()["gpu"]
    assert not gpu.ok
    assert not gpu.required
