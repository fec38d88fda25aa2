"""The command line: exit codes, reports as text and as JSON, configs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coda.cli import main
from coda.frontend import load_path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RESIDUAL = str(EXAMPLES / "residual_stats.coda")
TWO = "program a(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }\nprogram b(x: f32[M]) { return x + 1: f32 }\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "p.coda") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def usage_error(*argv: str) -> bool:
    """Whether the command line itself is refused."""
    with pytest.raises(SystemExit) as error:
        main([*argv])
    return error.value.code == 2


# check


def test_check_accepts_the_examples(capsys):
    files = sorted(map(str, EXAMPLES.glob("*.coda")))
    assert main(["check", *files]) == 0
    assert capsys.readouterr().out.count(": ok (") == len(files)


def test_check_reports_every_file_and_every_mistake(write, capsys):
    bad = write("program p(x: bf16[M, K], w: bf16[N, K]) { return silo(x @ w.T) + y: bf16 }")
    assert main(["check", bad, RESIDUAL]) == 1
    out, err = capsys.readouterr()
    assert "residual_stats.coda: ok" in out
    assert err.count("error:") == 2
    assert "silo" in err
    assert "^" in err


def test_check_as_json(write, capsys):
    bad = write("program p(x: bf16[M, K]) { return y: bf16 }")
    assert main(["check", bad, RESIDUAL, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [f["ok"] for f in report["files"]] == [False, True]
    assert report["files"][0]["diagnostics"][0]["line"] == 1
    assert report["files"][1]["programs"] == ["residual_stats"]


def test_a_missing_file_is_a_wrong_input(capsys):
    assert main(["check", "nowhere.coda"]) == 1
    assert "cannot read nowhere.coda" in capsys.readouterr().err


# usage


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["chek", "x.coda"],
        ["check"],
        ["explain", RESIDUAL, "--dims", "M=many"],
        ["explain", RESIDUAL, "--dims", "M:4"],
        ["explain", RESIDUAL, "--gpu", "abacus"],
        ["run", RESIDUAL, "--device", "tpu"],
    ],
)
def test_usage_errors_exit_with_2(argv):
    assert usage_error(*argv)


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("coda ")


# which program


def test_a_file_with_several_programs_needs_a_name(write, capsys):
    path = write(TWO)
    assert main(["explain", path]) == 1
    assert "--program a | b" in capsys.readouterr().err
    assert main(["explain", path, "--program", "a"]) == 0
    assert main(["explain", path, "--program", "aa"]) == 1
    assert "did you mean 'a'" in capsys.readouterr().err


def test_an_unknown_axis_is_a_wrong_input(capsys):
    assert main(["explain", RESIDUAL, "--dims", "Q=3"]) == 1
    assert "has no axis 'Q'" in capsys.readouterr().err


# explain


def test_explain_shows_kernel_bytes_and_floor(capsys):
    assert main(["explain", RESIDUAL, "--dims", "M=8192,D=4096,A=4096"]) == 0
    out = capsys.readouterr().out
    assert "prefetched by TMA" in out
    assert "274.9 GFLOP" in out
    assert "floor on NVIDIA H200" in out


def test_explain_without_sizes_gives_formulas(capsys):
    assert main(["explain", RESIDUAL]) == 0
    assert "2*A*D*M" in capsys.readouterr().out


def test_explain_as_json(capsys):
    assert main(["explain", RESIDUAL, "--dims", "M=8192,D=4096,A=4096", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["values"]["flops"] == 2 * 8192 * 4096 * 4096
    assert report["values"]["fused"] < report["values"]["two_kernels"] < report["values"]["one_by_one"]
    assert report["kernel"]["launches"] == 1
    assert report["floor_ms"]["fused"] > 0


def test_explain_lists_every_kernel_of_a_block(capsys):
    assert main(["explain", str(EXAMPLES / "mlp_block.coda"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernel"] is None and report["reason"] is None
    assert [k["kind"] for k in report["kernels"]] == ["row", "gemm", "gemm"]
    assert report["launches"] == 3
    assert report["between"] == {"r": "f32[M]", "t": "bf16[M, D]", "y": "bf16[M, F]"}


def test_explain_says_why_a_program_is_not_lowered(write, capsys):
    path = write("program pool(x: i64[B, T, D]) {\n    return sum(x, T): i64\n}\n")
    assert main(["explain", path, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == []
    assert "a reduction of integers" in report["reason"]


# run


PROGRAMS = [(path, name) for path in sorted(EXAMPLES.glob("*.coda")) for name in load_path(path).programs]


@pytest.mark.parametrize(("path", "name"), PROGRAMS, ids=[name for _, name in PROGRAMS])
def test_run_small_verifies_every_example(path, name, capsys):
    assert main(["run", str(path), "--program", name, "--small", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["route"] in ("reference", "empty")


def test_run_says_that_the_interpreter_ran(capsys):
    assert main(["run", RESIDUAL, "--small", "--device", "cpu"]) == 0
    assert "reference interpreter" in capsys.readouterr().out


def test_run_needs_sizes(capsys):
    assert main(["run", RESIDUAL, "--dims", "M=8"]) == 1
    err = capsys.readouterr().err
    assert "D" in err
    assert "--small" in err


def test_run_exits_with_1_over_the_gate(monkeypatch, capsys):
    from coda.runtime import compare

    monkeypatch.setattr(compare, "_floor", lambda *args: 0.0)
    monkeypatch.setattr(compare.compare, "__kwdefaults__", {"dims": None, "factor": 0.0})
    assert main(["run", RESIDUAL, "--small", "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out


# configs

CONFIG = """
program = "p.coda"
name = "a"

[dims]
M = 16
N = 24
K = 32

[target]
tile = "128x192"
"""


def test_a_config_gives_program_sizes_and_tile(write, capsys):
    write(TWO)
    config = write(CONFIG, "c.toml")
    assert main(["explain", config, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["program"], report["dims"]) == ("a", {"M": 16, "N": 24, "K": 32})
    assert report["kernel"]["tile"] == "128x192"


def test_options_override_a_config(write, capsys):
    write(TWO)
    config = write(CONFIG, "c.toml")
    assert main(["explain", config, "--dims", "M=32", "--tile", "128x128", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dims"]["M"] == 32
    assert report["kernel"]["tile"] == "128x128"


def test_a_config_may_change_the_dtypes_of_parameters(write, capsys):
    write(TWO)
    config = write(CONFIG + '[dtypes]\nx = "f16"\nw = "f16"\n', "c.toml")
    assert main(["run", config, "--device", "cpu"]) == 0
    wrong = write(CONFIG + '[dtypes]\nww = "f16"\n', "wrong.toml")
    assert main(["run", wrong]) == 1
    assert "did you mean 'w'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('program = "p.coda"\ndim = 3\n', "unknown key 'dim'"),
        ('program = "p.coda"\ndim = 3\n', "did you mean 'dims'"),
        ('program = "p.coda"\n[target]\ntiel = "1x1"\n', "unknown key 'target.tiel'"),
        ('program = "p.coda"\n[dims]\nM = "8"\n', "'dims.M' must be a whole number"),
        ('program = "p.coda"\ntarget = 3\n', "'target' must be a table"),
        ('name = "a"\n', "'program' is missing"),
        ("program = \n", "c.toml"),
    ],
)
def test_mistakes_in_a_config(write, capsys, text, message):
    write(TWO)
    assert main(["explain", write(text, "c.toml")]) == 1
    assert message in capsys.readouterr().err


# lower


def test_lower_without_building_lists_or_writes_the_sources(tmp_path, capsys):
    assert main(["lower", RESIDUAL, "--no-build"]) == 0
    assert "residual_stats_gemm_128x128.cu" in capsys.readouterr().out
    assert main(["lower", RESIDUAL, "--no-build", "--keep-sources", str(tmp_path / "s"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {Path(p).name for p in report["sources"]} == {p.name for p in (tmp_path / "s").iterdir()}
    assert (tmp_path / "s" / "residual_stats.h").read_text().startswith("/*")


def test_lower_chooses_tiles_by_size_or_as_told(capsys):
    """Case M4: a tile that cannot be is told before anything is compiled."""
    assert main(["lower", RESIDUAL, "--no-build", "--tile", "128x128,128x192", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiles"] == ["128x128", "128x192"]
    assert main(["lower", RESIDUAL, "--no-build", "--tile", "128x100"]) == 1
    assert "128x192" in capsys.readouterr().err


def test_lower_tells_which_sizes_would_be_refused(capsys):
    assert main(["lower", RESIDUAL, "--no-build", "--dims", "M=64,D=64,A=65"]) == 1
    assert "TMA needs a multiple of 16" in capsys.readouterr().err


def test_lower_makes_one_artifact_of_a_block(capsys):
    assert main(["lower", str(EXAMPLES / "mlp_block.coda"), "--no-build", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == ["mlp_block_1_row", "mlp_block_2_gemm", "mlp_block_3_gemm"]


@pytest.mark.parametrize(("memory", "kernels"), [("fast", ["map", "gemm", "gemm"]), ("low", ["gemm", "gemm", "gemm"])])
def test_lower_with_backward(memory, kernels, capsys):
    path = str(EXAMPLES / "linear_cross_entropy.coda")
    options = ["--memory", memory, "--dims", "M=8192,V=128256,D=4096"]
    assert main(["lower", path, "--no-build", "--backward", "--wrt", "x,w", *options, "--json"]) == 0
    forward, backward = json.loads(capsys.readouterr().out)["programs"]
    assert forward["kernels"] == ["linear_cross_entropy"]
    assert backward["program"] == "linear_cross_entropy_backward"
    assert backward["chunks"] == "V"
    assert [n for n in backward["kernels"] if "_chunk_" in n] == [
        f"linear_cross_entropy_backward_chunk_{i}_{kind}" for i, kind in enumerate(kernels, 1)
    ]


def test_derive_tells_what_runs_in_chunks(capsys):
    path = str(EXAMPLES / "linear_cross_entropy.coda")
    assert main(["derive", path, "--wrt", "x,w", "--memory", "low"]) == 0
    text = capsys.readouterr().out
    assert "# chunk: 'linear_cross_entropy_backward' is computed in chunks of 'V' [algebraic (sums over 'V'" in text
    assert "_chunk(" not in text
    assert main(["derive", path, "--wrt", "x,w", "--memory", "low", "--kernels"]) == 0
    text = capsys.readouterr().out
    assert text.count("# gemm kernel\nprogram linear_cross_entropy_backward_chunk") == 3


def test_options_of_a_backward_that_is_not_asked_for():
    assert usage_error("lower", RESIDUAL, "--no-build", "--memory", "low")


def test_lower_says_why_a_program_cannot_be_lowered(write, capsys):
    path = write("program pool(x: i64[B, T, D]) {\n    return sum(x, T): i64\n}\n")
    assert main(["lower", path, "--no-build"]) == 1
    assert "a reduction of integers" in capsys.readouterr().err


def test_lower_needs_a_place_for_the_library():
    assert usage_error("lower", RESIDUAL)
    assert usage_error("lower", RESIDUAL, "-o", "x.dll")
    assert usage_error("lower", RESIDUAL, "-o", "x.so", "--arch", "sm_90")


def test_a_failing_build_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CODA_NVCC", str(tmp_path / "no-nvcc"))
    target = tmp_path / "out" / "x.so"
    assert main(["lower", RESIDUAL, "-o", str(target)]) == 1
    assert "CODA_NVCC" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["linear_bias_gelu", "swiglu_preact", "mlp_block"])
def test_run_backward_checks_the_derived_gradients(name, capsys):
    assert main(["run", str(EXAMPLES / f"{name}.coda"), "--small", "--backward", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and len(report["outputs"]) >= 3
    assert set(report["routes"]) == {name, f"{name}_backward"}


def test_run_backward_of_an_artifact_is_refused(capsys):
    assert main(["run", "x.so", "--small", "--backward"]) == 1
    assert "an artifact is compiled already" in capsys.readouterr().err


def test_derive_prints_programs_that_check(tmp_path, capsys):
    out = tmp_path / "mlp.coda"
    assert main(["derive", str(EXAMPLES / "mlp_block.coda"), "-o", str(out)]) == 0
    assert main(["check", str(out)]) == 0
    assert "ok (mlp_block, mlp_block_backward)" in capsys.readouterr().out
    assert "# delay_norm: a row factor of 'n' is behind the product" in out.read_text()


def test_derive_shows_kernels_and_takes_a_choice_of_parameters(capsys):
    assert main(["derive", str(EXAMPLES / "swiglu_preact.coda"), "--wrt", "n", "--kernels"]) == 0
    text = capsys.readouterr().out
    assert "# gemm kernel" in text and "d_n" in text and "d_w_gate" not in text
    assert main(["derive", str(EXAMPLES / "swiglu_preact.coda"), "--wrt", "gate"]) == 1
    assert "w_gate" in capsys.readouterr().err  # the hint
