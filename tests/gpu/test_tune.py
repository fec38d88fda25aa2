"""The tuner on a device: candidates built, checked and timed in a process of their own; what is wrong or crashes is
dropped; the choice is used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import coda
from coda import build
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs, small_sizes
from coda.runtime.unfused import Unfused
from coda.target import TILES, candidates
from coda.target.tiles import orders_of
from coda.tuning import choice as choices
from coda.tuning.child import Job, measure
from coda.tuning.decide import UNFUSED
from coda.tuning.tune import tune
from tests.support import program, same_bits

GELU = "program tuned(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) { return gelu_tanh(x @ w.T + bias): bf16 }"
SIZES = {"M": 4096, "N": 1536, "K": 512}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Choices of this test alone; artifacts stay in the cache."""
    monkeypatch.setattr(choices, "folder", lambda root=None: tmp_path / "tuned")
    return tmp_path


def test_a_kernel_is_tuned_and_the_choice_is_used(store: Path) -> None:
    p = program(GELU)
    schedule = build.lowered(p)
    report = tune(schedule, SIZES, seconds=5)
    (found,) = report.choices
    names = [t.name for t in candidates(schedule.gemms[0], SIZES)]
    assert set(found.timings) | set(found.dropped) == {*names, UNFUSED}
    assert all("spills" in reason for reason in found.dropped.values()), found.dropped
    assert found.unfused == "torch.compile"
    assert all(0 < t.ms < 10 for t in found.timings.values())
    best = min((t.ratio, n) for n, t in found.timings.items() if n != UNFUSED)
    assert found.timings[found.tile].ratio <= 1.006 * best[0]
    assert found.declined == (found.timings[found.tile].ratio >= 1)

    assert tune(schedule, SIZES).choices == (found,)  # from disk
    f = coda.compile(p)
    f(**random_inputs(p, SIZES, 0, "cuda"))
    assert f.last_route.kind == ("unfused" if found.declined else "kernel"), str(f.last_route)
    strict = coda.compile(p, fallback="strict")
    strict(**random_inputs(p, SIZES, 0, "cuda"))
    assert strict.artifact.tiles == [found.tile]


def test_a_program_of_two_kernels(store: Path) -> None:
    p = program(
        "program two(x: bf16[M, K], w: bf16[N, K], v: bf16[K, N]) {\n"
        "  h = cast(relu(x @ w.T), bf16)\n  return h @ v.T: bf16\n}"
    )
    sizes = {"M": 2048, "N": 1024, "K": 512}
    *kernels, whole = tune(build.lowered(p), sizes, seconds=6).choices
    assert len(kernels) == 2 and whole.tile is None
    f = coda.compile(p, fallback="strict")
    inputs = random_inputs(p, sizes, 3, "cuda")
    result = compare(p, inputs, {p.outputs[0].name: f(**inputs)})
    assert result.ok, str(result)


def test_b7_n5_wrong_and_crashing_candidates_are_dropped(tmp_path: Path) -> None:
    good = build.library(build.lowered(program(GELU)), "128x128", None, build.DEFAULT_ARCH)
    other = GELU.replace("gelu_tanh(x @ w.T + bias)", "gelu_tanh(x @ w.T - bias)")
    wrong = build.library(build.lowered(program(other)), "128x128", None, build.DEFAULT_ARCH)
    (tmp_path / "crash.c").write_text("#include <stdlib.h>\n__attribute__((constructor)) void f(void) { abort(); }\n")
    crash = tmp_path / "crash.so"
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", crash, tmp_path / "crash.c"], check=True)
    libraries = {"crash": crash, "good": good, "wrong": wrong}
    job = Job(SIZES, {name: str(path) for name, path in libraries.items()}, 5, 1.0)
    outcome = measure(job, print)
    assert set(outcome.timings) == {"good", UNFUSED}
    assert outcome.dropped["crash"].startswith("its process was ended by signal 6")
    assert outcome.dropped["wrong"].startswith("its results are wrong: 'out' has error")
    torch.ones(1, device="cuda").add_(1).cpu()  # this process is unharmed


@pytest.mark.parametrize("tile", [t.name for t in TILES])
def test_every_order_of_tiles_gives_the_same_bits(tile: str) -> None:
    (plain,) = (t for t in TILES if t.name == tile)
    p = program(GELU)
    sizes = {"M": 2700, "N": 2744, "K": 136}  # ragged; more clusters than a group either way
    inputs = random_inputs(p, sizes, 0, "cuda")
    outputs = []
    for ordered in orders_of(plain):
        f = coda.compile(p, tile=ordered.name, fallback="strict")
        outputs.append(f(**inputs, out=torch.full((2700, 2744), float("nan"), device="cuda", dtype=torch.bfloat16)))
    result = compare(p, inputs, {"out": outputs[0]})
    assert result.ok, f"{tile}\n{result}"
    assert all(same_bits(outputs[0], x) for x in outputs[1:])


@pytest.mark.parametrize("name", ["swiglu", "residual_rstd", "qkv_rope", "cross_entropy"])
def test_the_unfused_way_passes_the_gate(name: str) -> None:
    (p,) = coda.parse(Path(__file__).parents[2] / "examples" / f"{name}.coda").programs.values()
    sizes = small_sizes(p)
    inputs = random_inputs(p, sizes, 0, "cuda")
    unfused = Unfused(p)
    for _ in range(2):
        result = compare(p, inputs, unfused(inputs, sizes), dims=sizes)
        assert result.ok, str(result)
    assert unfused.how == "torch.compile"
