"""Artifacts of several programs on the device: what ``coda lower`` makes of a config, run program by program."""

from __future__ import annotations

from pathlib import Path

import pytest

import coda
from coda.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_forward_and_backward_of_one_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "norm.toml"
    config.write_text(f'program = "{EXAMPLES / "rms_norm_linear.coda"}"\nbackward = true\n[dims]\nD = 512\nN = 768\n')
    library = str(tmp_path / "norm.so")
    assert main(["lower", str(config), "-o", library]) == 0
    for name in ("rms_norm_linear", "rms_norm_linear_backward"):
        assert coda.load(library, program=name).program.name == name
        for rows in (1, 129, 4096):
            dims = f"M={rows},D=512,N=768"
            assert main(["run", library, "--program", name, "--dims", dims, "--device", "cuda"]) == 0, name
    assert "ran: the kernel" in capsys.readouterr().out
