"""The configs of examples/: common models, each one artifact with forward and backward, at their sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coda.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=[p.stem for p in CONFIGS])
def test_a_config_lowers_forward_and_backward(path, capsys):
    """At sizes that the kernels take: a refusal would be an error."""
    assert main(["lower", str(path), "--no-build", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["program"] == path.stem and report["arch"] == "sm_90a"
    names = [p["program"] for p in report["programs"]]
    assert len(set(names)) == len(names) >= 4
    forward = [n for n in names if "_backward" not in n]
    assert [n for n in names if "_backward" in n] == [_backward(n) for n in forward]
    assert all(p["kernels"] for p in report["programs"])
    assert {"host.cpp", f"{path.stem}.h"} <= set(report["sources"])


def _backward(name: str) -> str:
    """llama3_layer_1, a segment, has its counterpart in llama3_layer_backward_1."""
    stem, _, number = name.rpartition("_")
    return f"{stem}_backward_{number}" if number.isdecimal() else f"{name}_backward"


def test_a_list_of_programs_wants_a_choice_where_one_is_explained(capsys):
    config = str(EXAMPLES / "phi3_mini.toml")
    assert main(["explain", config]) == 1
    assert "choose one: --program phi3_qkv | phi3_mlp" in capsys.readouterr().err
    assert main(["explain", config, "--program", "phi3_mlp", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backward"]["program"] == "phi3_mlp_backward"  # the config says backward = true
    assert report["values"]["flops"] == 2 * 8192 * 3072 * (3072 + 3 * 8192)


BOTH = """
program a(x: bf16[M, K], w: bf16[N, K]) { return y = relu(x @ w.T): bf16 }
program b(x: bf16[M, K], v: bf16[P, K]) { return z = silu(x @ v.T): bf16 }
"""


def config(folder: Path, more: str) -> str:
    (folder / "p.coda").write_text(BOTH)
    (folder / "c.toml").write_text(f'program = "p.coda"\n{more}')
    return str(folder / "c.toml")


def test_gradients_that_a_config_wants(tmp_path, capsys):
    path = config(tmp_path, 'name = ["a", "b"]\nbackward = true\nwrt = ["x"]\n[dims]\nM = 64\nN = 64\nP = 32\n')
    assert main(["lower", path, "--no-build", "--json", "--keep-sources", str(tmp_path / "s")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["program"] for p in report["programs"]] == ["a", "a_backward", "b", "b_backward"]
    header = (tmp_path / "s" / "c.h").read_text()
    assert header.count("_run(DLTensor") == 4 and "d_x: bf16[M, K]" in header and "d_w:" not in header


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('name = ["a", "b"]\n[dims]\nQ = 3\n', "no program has an axis 'Q'"),
        ('name = ["a", "c"]\n', "no program 'c'"),
        ("name = [1]\n", "'name' must be a string or a list of strings, not [1]"),
        ('name = "a"\nbackward = 1\n', "'backward' must be true or false, not 1"),
        ('name = "a"\nbackward = true\nwrt = "x"\n', "'wrt' must be a list of strings"),
        ('name = "a"\nbackward = true\nwrt = ["y"]\n', "there is no parameter 'y'"),
    ],
)
def test_mistakes(tmp_path, capsys, more, message):
    assert main(["lower", config(tmp_path, more), "--no-build"]) == 1
    assert message in capsys.readouterr().err
