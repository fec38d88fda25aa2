"""Tuning programs, with stand-ins for nvcc and the measuring process; and using what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import coda
from coda import build
from coda.build.compile import SpillError
from coda.cli import main
from coda.errors import CodaError
from coda.passes import fuse
from coda.passes.segments import segments
from coda.runtime.callable import CompiledProgram
from coda.runtime.chain import ChainedProgram
from coda.runtime.compare import compare
from coda.runtime.device import Device
from coda.runtime.inputs import random_inputs
from coda.runtime.operands import resolve
from coda.target import TILES, candidates
from coda.target.schedule import Assembly
from coda.tuning import choice as choices
from coda.tuning import tune as tuning
from coda.tuning.child import Job, Outcome
from coda.tuning.decide import UNFUSED
from coda.tuning.use import Tuning
from tests.support import PredicateArtifact, bf16, program
from tests.tuning.support import LINEAR, choice, measurement
from tests.unit.test_calls import Interpreted, layer

H200 = Device("NVIDIA H200", "580.159.04")
SIZES = {"M": 8192, "N": 4096, "K": 4096}
BLOCK = """
program block(x: bf16[M, D], w: bf16[F, D], v: bf16[D, F]) {
    h = cast(silu(x @ w.T), bf16)
    return h @ v.T: bf16
}
"""
BLOCK_SIZES = {"M": 8192, "D": 1024, "F": 4096}


class Machine:
    """A GPU and a compiler that exist on paper. 128x192 spills; ``ratio`` says how fast each tile is."""

    def __init__(self) -> None:
        self.built: list[list[str]] = []
        self.jobs: list[Job] = []
        self.ratio = {"128x160_s4": 0.8}
        self.unfused = True

    def cached_of(self, name: str, assemblies: Sequence[Assembly], arch: str, progress: object = None) -> Path:
        (assembly,) = assemblies
        tiles = [v.tile.name for v in assembly.variants]
        self.built.append(tiles)
        if any(tile.startswith("128x192") for tile in tiles):
            raise SpillError.of(f"kernel '{assembly.variants[0].symbol}' spills registers inside its k-loop")
        return Path("/".join([name, *tiles]))

    def measure(self, job: Job, say: object) -> Outcome:
        self.jobs.append(job)
        outcome = Outcome({name: measurement(self.ratio.get(name, 0.9)) for name in job.candidates})
        if self.unfused:
            outcome.timings[UNFUSED], outcome.unfused = measurement(1.0), "torch.compile"
        else:
            outcome.dropped[UNFUSED] = "it cannot be run: OutOfMemoryError"
        return outcome


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    machine = Machine()
    monkeypatch.setenv("CODA_CACHE", str(tmp_path))
    monkeypatch.setattr("coda.tuning.tune.current_device", lambda: H200)
    monkeypatch.setattr("coda.tuning.use.current_device", lambda: H200)
    monkeypatch.setattr(build, "cached_of", machine.cached_of)
    monkeypatch.setattr(tuning, "measure", machine.measure)
    return machine


def test_a_kernel_is_tuned_once(machine: Machine) -> None:
    schedule = build.lowered(program(LINEAR))
    report = tuning.tune(schedule, SIZES, jobs=2)
    (found,) = report.choices
    assert report.saved
    assert (found.tile, found.declined, found.fused_ms, found.unfused_ms) == ("128x160_s4", False, 0.8, 1.0)
    names = [t.name for t in candidates(schedule.gemms[0], SIZES)]
    spilled = [n for n in names if n.startswith("128x192")]
    assert sorted(t for (t,) in machine.built) == sorted(names)
    assert list(machine.jobs[0].candidates) == [n for n in names if n not in spilled]  # in order of preference
    assert sorted(found.dropped) == sorted(spilled)
    assert "spills registers inside its k-loop" in found.dropped["128x192"]

    assert tuning.tune(schedule, SIZES | {"M": 8100}).choices == (found,)
    assert len(machine.jobs) == 1
    tuning.tune(schedule, SIZES, again=True)
    tuning.tune(schedule, SIZES | {"M": 64})
    assert len(machine.jobs) == 3


def test_what_shares_device_code_is_not_built_at_once(machine: Machine) -> None:
    tuning.tune(build.lowered(program(LINEAR)), SIZES, jobs=1)
    kernels = [tile.split("_s")[0] for (tile,) in machine.built]
    assert kernels == sorted(kernels)


def test_a_program_of_several_kernels(machine: Machine) -> None:
    """Each product alone, then all of them, built with the tiles that were chosen, against separate kernels."""
    schedule = build.lowered(program(BLOCK))
    assert len(schedule.gemms) == 2
    report = tuning.tune(schedule, BLOCK_SIZES)
    *kernels, whole = report.choices
    assert [c.tile for c in kernels] == ["128x160_s4"] * 2
    assert (whole.program, whole.tile) == ("block", None)
    assert machine.built[-1] == ["128x160_s4"] * 2
    assert list(machine.jobs[-1].candidates) == [tuning.WHOLE]
    assert machine.jobs[-1].sizes == BLOCK_SIZES


def test_a_product_without_a_candidate_is_left_out_and_the_whole_is_built_by_the_formula(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build.lowered(program(BLOCK))
    first, second = (plan.name for plan in schedule.gemms)

    def measure(job: Job, say: object) -> Outcome:
        if any(path.startswith(first) for path in job.candidates.values()):
            raise CodaError.of("no candidate can be used: all crash")
        return machine.measure(job, say)

    monkeypatch.setattr(tuning, "measure", measure)
    report = tuning.tune(schedule, BLOCK_SIZES)
    assert report.left_out == {first: "no candidate can be used: all crash"}
    assert [c.program for c in report.choices] == [second, "block"]
    assert machine.built[-1] == [candidates(schedule.gemms[0], BLOCK_SIZES)[0].name, "128x160_s4"]


def test_nothing_that_can_be_built_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached_of(*_: object) -> Path:
        raise SpillError.of("it spills")

    monkeypatch.setattr(build, "cached_of", cached_of)
    with pytest.raises(CodaError, match=r"'linear': no candidate can be built: .*128x128_s4: it spills"):
        tuning.tune(build.lowered(program(LINEAR)), SIZES)


def test_kernels_are_known_by_what_they_compute(machine: Machine) -> None:
    tuning.tune(build.lowered(program(BLOCK)), BLOCK_SIZES)
    before = len(machine.jobs)
    tuning.tune(build.lowered(program(BLOCK.replace("program block", "program another"))), BLOCK_SIZES)
    assert len(machine.jobs) == before


def test_nothing_to_compare_with(machine: Machine) -> None:
    machine.unfused = False
    (found,) = tuning.tune(build.lowered(program(LINEAR)), SIZES).choices
    assert (found.declined, found.unfused_ms) == (False, None)
    assert found.unfused == "it cannot be run: OutOfMemoryError"
    assert UNFUSED not in found.dropped


def test_sizes_must_be_known(machine: Machine) -> None:
    with pytest.raises(CodaError, match="the sizes of N are not known"):
        tuning.tune(build.lowered(program(LINEAR)), {"M": 8192, "K": 4096})


# Use.


def test_the_tile_that_was_chosen_is_built(machine: Machine) -> None:
    schedule = build.lowered(program(LINEAR))
    use = Tuning(build.lowered)
    assert use.tiles(schedule, SIZES) == {}
    tuning.tune(schedule, SIZES)
    chosen = use.tiles(schedule, SIZES)
    assert {name: t.name for name, t in chosen.items()} == {"linear": "128x160_s4"}
    build.library(schedule, None, SIZES, build.DEFAULT_ARCH, chosen=chosen)
    assert machine.built[-1] == ["128x160_s4"]
    assert Tuning(build.lowered, False).tiles(schedule, SIZES) == {}
    assert use.tiles(schedule, SIZES | {"M": 64}) == {}


def test_the_formula_follows_where_the_chosen_tile_spills(machine: Machine) -> None:
    schedule = build.lowered(program(LINEAR))
    (wide,) = (t for t in TILES if t.name == "128x192")
    path = build.library(schedule, None, SIZES, build.DEFAULT_ARCH, chosen={schedule.name: wide})
    assert path.name == candidates(schedule.gemms[0], SIZES)[0].name


def test_tune_true_measures_at_the_first_sizes_only(machine: Machine) -> None:
    p, use = program(LINEAR), Tuning(build.lowered, True)
    assert use.tiles(build.lowered(p), {"N": 4096, "K": 4096}) == {}  # M is not known yet
    assert use.declined(p, SIZES) is None
    assert use.declined(p, SIZES | {"M": 64}) is None
    assert len(machine.jobs) == 1
    assert use.tiles(build.lowered(p), SIZES)["linear"].name == "128x160_s4"


def test_what_cannot_be_measured_runs_as_if_nobody_had_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(job: Job, say: object) -> Outcome:
        raise CodaError.of("the measuring process failed: CUDA out of memory")

    monkeypatch.setattr(tuning, "measure", measure)
    p, use = program(LINEAR), Tuning(build.lowered, True)
    with pytest.warns(UserWarning, match="'linear' is not tuned: the measuring process failed: CUDA out of memory"):
        assert use.tiles(build.lowered(p), SIZES) == {}
    assert use.declined(p, SIZES) is None  # and is not tried again


def test_declined_where_it_was_measured_to_lose(machine: Machine) -> None:
    """Case L5."""
    p, use = program(LINEAR), Tuning(build.lowered)
    machine.ratio = dict.fromkeys((t.name for t in candidates(build.lowered(p).gemms[0], SIZES)), 1.25)
    tuning.tune(build.lowered(p), SIZES)
    assert use.declined(p, SIZES) == (
        "measured at M=8192, K=4096, N=4096, fused kernels take 1.25 ms, torch.compile with separate kernels 1 ms"
    )
    assert use.declined(p, SIZES | {"M": 64}) is None
    assert Tuning(build.lowered, False).declined(p, SIZES) is None


def test_a_program_without_kernels_is_not_declined(machine: Machine) -> None:
    def refuse(p):
        raise CodaError.of("no")

    assert Tuning(refuse).declined(program(LINEAR), SIZES) is None


def test_compile_builds_what_was_chosen(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coda.runtime.library.Artifact", lambda path, **_: path)
    p = program(LINEAR)
    formula = candidates(build.lowered(p).gemms[0], SIZES)[0].name
    tuning.tune(build.lowered(p), SIZES)
    for options, tile in (({}, "128x160_s4"), ({"tune": False}, formula), ({"tile": "128x256_coop"}, "128x256_coop")):
        f = coda.compile(p, **options)
        f.build(p, SIZES, f.tile)
        assert machine.built[-1] == [tile]
    assert coda.compile(p, tile="128x128").measured is None  # what was asked for is not declined


def test_the_option_is_checked() -> None:
    with pytest.raises(CodaError, match="tune is 'always'"):
        coda.compile(LINEAR, tune="always")


class Declining:
    def declined(self, program, sizes):
        return "measured at these sizes, it loses" if sizes["M"] > 4 else None


def call(fallback: str = "copy") -> CompiledProgram:
    p = program(LINEAR)
    return CompiledProgram(p, fallback=fallback, artifact=PredicateArtifact(p), device_type="cpu", measured=Declining())


def test_a_declined_call_runs_unfused_and_says_so() -> None:
    f = call()
    x, w = bf16(6, 16), bf16(8, 16)
    y = f(x, w)
    assert str(f.last_route) == "unfused: measured at these sizes, it loses"
    assert f.artifact.runs == 0
    assert torch.equal(y, x @ w.T)
    assert f(x.reshape(2, 3, 16), w).shape == (2, 3, 8)
    out = torch.empty(6, 8).bfloat16()
    assert f(x, w, out=out) is out and torch.equal(out, y)
    f(x[:2], w)
    assert f.last_route.kind == "kernel"


def test_a_declined_call_like_an_earlier_one_takes_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    f, w = call(), bf16(8, 16)
    looked: list[int] = []
    monkeypatch.setattr("coda.runtime.callable.resolve", lambda *how: looked.append(1) or resolve(*how))
    for shape in ((6, 16), (2, 3, 16), (6, 16), (2, 3, 16)):
        x = bf16(*shape)
        assert torch.equal(f(x, w), x @ w.T)
        assert str(f.last_route) == "unfused: measured at these sizes, it loses"
    assert len(looked) == 2
    assert f.remembered({"x": x, "w": w}) is None  # nothing to launch


def test_strict_means_the_kernel() -> None:
    f = call("strict")
    f(bf16(6, 16), bf16(8, 16))
    assert f.last_route.kind == "kernel"


def test_inout_parameters_of_a_declined_call_are_written() -> None:
    p = program("program grad(dy: bf16[M, N], x: bf16[M, K], inout dw: f32[N, K]) { dw += dy.T @ x }")
    f = CompiledProgram(p, artifact=PredicateArtifact(p), device_type="cpu", measured=Declining())
    dy, x, dw = bf16(6, 8), bf16(6, 16), torch.ones(8, 16)
    f(dy, x, dw)
    assert f.last_route.kind == "unfused"
    want = 1 + (dy.T @ x).float()
    assert (dw - want).norm() / want.norm() < 1e-2


def test_a_segment_between_opaque_calls_is_declined_by_itself() -> None:
    p = layer()
    first, last = f"{p.name}_1", f"{p.name}_2"

    class Measured:
        def declined(self, program, sizes):
            return "it loses" if program.name == last else None

    def build_segment(part, sizes, tile):
        assert part.name == first
        artifact = Interpreted(part)
        artifact.dims = {"B": 2}
        return artifact

    parts = segments(fuse(p).forward)
    f = ChainedProgram(p, {"B": 2}, build=build_segment, device_type="cpu", measured=Measured(), parts=parts)
    inputs = random_inputs(p, {"B": 2, "T": 3, "D": 16, "F": 24, "P": 8})
    assert compare(p, inputs, {"out": f(**inputs)}, dims={"B": 2}).ok
    assert str(f.last_route) == "unfused: it loses"


# The command.


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "linear.coda"
    path.write_text(LINEAR)
    return str(path)


def test_without_a_gpu_it_is_an_error(file: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", file, "--dims", "M=8192,N=4096,K=4096"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: tuning measures kernels on an sm_90 GPU, and there is none here" in err
    assert "coda doctor" in err
    assert main(["tune", file, "--dims", "M=8192,N=4096,K=4096", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--budget", "soon"], ["--budget", "-1"], ["--tile", "128x128"]])
def test_options_are_checked(file: str, options: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["tune", file, *options])
    assert error.value.code == 2


def test_missing_sizes(file: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", file, "--dims", "M=8192"]) == 1
    assert "the sizes of K, N are not known" in capsys.readouterr().err


def test_what_was_found_is_reported(machine: Machine, file: str, capsys: pytest.CaptureFixture) -> None:
    command = ["tune", file, "--dims", "M=8192,N=4096,K=4096", "--budget", "9"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("on NVIDIA H200, driver 580.159.04\nlinear at M=8192, K=4096, N=4096\n")
    row = next(line.split() for line in text.splitlines() if line.startswith("  128x160_s4 "))
    assert row == ["128x160_s4", "0.8000", "0.800", "0.790", "to", "0.810", "chosen"]
    assert "dropped 128x192: kernel 'linear_gemm_128x192' spills registers" in text
    assert text.endswith("  fused: 0.8 ms; torch.compile takes 1 ms\n")
    assert machine.jobs[0].seconds == 9
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["device"], document["saved"]) == ("NVIDIA H200", True)
    assert document["choices"][0]["tile"] == "128x160_s4"


def test_the_backward_is_tuned_with_the_forward(
    machine: Machine, file: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Both ways of asking for it: by the option, and by a config, which names programs, too."""
    sizes = "M=8192,N=4096,K=4096"
    assert main(["tune", file, "--dims", sizes, "--backward", "--wrt", "w", "--json"]) == 0
    programs = [c["program"] for c in json.loads(capsys.readouterr().out)["choices"]]
    assert programs == ["linear", "linear_backward"]
    (tmp_path / "c.toml").write_text(
        'program = "linear.coda"\nbackward = true\nwrt = ["w"]\n[dims]\nM = 8192\nN = 4096\nK = 4096\n'
    )
    before = len(machine.jobs)
    assert main(["tune", str(tmp_path / "c.toml")]) == 0
    assert len(machine.jobs) == before  # known by now
    assert "linear_backward at" in capsys.readouterr().out


def test_a_decline_and_a_cache_that_cannot_be_written_are_told(
    machine: Machine, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    machine.ratio = {t.name: 1.5 for t in candidates(build.lowered(program(LINEAR)).gemms[0], SIZES)}
    monkeypatch.setattr(choices, "_UNSAVED", {})
    monkeypatch.setenv("CODA_CACHE", file)  # which is no folder
    assert main(["tune", file, "--dims", "M=8192,N=4096,K=4096"]) == 0
    text = capsys.readouterr().out
    assert "not fused: measured at M=8192, K=4096, N=4096, fused kernels take 1.5 ms" in text
    assert "the cache cannot be written" in text


def test_a_choice_with_nothing_to_compare_with_is_told() -> None:
    from coda.cli.tune import text

    shown = text(choice(unfused="it cannot be run: OutOfMemoryError", unfused_ms=None))
    assert shown.endswith("nothing to compare with: it cannot be run: OutOfMemoryError")


# What other commands make of it.


def test_explain_and_lower_know_the_choice(machine: Machine, file: str, capsys: pytest.CaptureFixture) -> None:
    sizes = ["--dims", "M=8192,N=4096,K=4096"]
    assert main(["explain", file, *sizes]) == 0
    assert "128x160_s4" not in capsys.readouterr().out
    tuning.tune(build.lowered(program(LINEAR)), SIZES)
    assert main(["explain", file, *sizes]) == 0
    assert "tile    128x160_s4" in capsys.readouterr().out
    assert main(["explain", file, *sizes, "--tile", "128x128"]) == 0
    assert "128x160_s4" not in capsys.readouterr().out
    assert main(["lower", file, *sizes, "--no-build"]) == 0
    assert "tiles: 128x160_s4\n" in capsys.readouterr().out
    assert main(["lower", file, "--dims", "M=64,N=4096,K=4096", "--no-build"]) == 0
    assert "128x160_s4" not in capsys.readouterr().out


def test_explain_tells_that_fusing_was_declined(machine: Machine, file: str, capsys: pytest.CaptureFixture) -> None:
    machine.ratio = {t.name: 1.5 for t in candidates(build.lowered(program(LINEAR)).gemms[0], SIZES)}
    tuning.tune(build.lowered(program(LINEAR)), SIZES)
    assert main(["explain", file, "--dims", "M=8192,N=4096,K=4096"]) == 0
    assert "not fused by coda.compile: measured at M=8192, K=4096, N=4096, fused" in capsys.readouterr().out
