"""``coda explain --measure`` on the device: each kernel beside its floor, which none can be below."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coda.cli import main

LLAMA = str(Path(__file__).parents[2] / "examples" / "llama3_block.coda")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_each_kernel_is_timed_beside_its_floor(backward: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "M=4096,D=2048,A=2048,F=8192"
    options = ["--measure", "--json", *(["--backward"] if backward else [])]
    assert main(["explain", LLAMA, "--program", "llama3_mlp", "--dims", sizes, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    for side in [report, report["backward"]] if backward else [report]:
        timed = [k for k in side["kernels"] if k["kind"] != "finish"]
        for kernel in timed:  # the rates of the floors are those of large shapes; no kernel is a fifth faster
            assert 0.8 * kernel["floor_ms"] < kernel["measured_ms"] < 10 * kernel["floor_ms"], kernel["name"]
        whole, parts = side["totals"]["measured_ms"], sum(k["measured_ms"] for k in timed)
        assert 0.7 * parts < whole < 1.5 * parts
