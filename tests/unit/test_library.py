"""Artifacts from Python: what they say of themselves, and what is not one."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

import coda
from coda.errors import CodaError
from coda.runtime.library import Artifact, formula
from coda.target import TILES
from tests.abi import harness


@pytest.fixture(scope="module")
def stats() -> Artifact:
    return Artifact(harness.library("stats"))


def test_description_is_complete(stats: Artifact) -> None:
    about = stats.describe
    assert (about["name"], about["arch"], about["compute_capability"]) == ("stats", "sm_90a", 90)
    assert about["versions"] == {"coda": coda.__version__, "cutlass": "4.2.0", "nvcc": "13.0.88"}
    (program,) = about["programs"]
    assert program["signature"] == (
        "stats(o: bf16[M, A], w: bf16[D, A], x: bf16[M, D]) -> h: bf16[M, D], out1: f32[M], out2: f32[partials, M]"
    )
    assert [v["tile"] for v in program["kernels"][0]["variants"]] == [t.name for t in TILES]
    assert "program stats(" in program["source"]
    assert "nearest even" in about["rounding"]


def test_program_is_that_which_was_lowered(stats: Artifact) -> None:
    assert stats.program.name == "stats"
    assert [p.name for p in stats.program.params] == ["o", "w", "x"]
    assert coda.load(stats.path).program is not None


def test_output_shapes_follow_the_variant(stats: Artifact) -> None:
    for m, d in ((1, 8), (300, 520), (8192, 4096)):
        width = stats.variant({"M": m, "D": d, "A": 64})["columns"]
        shapes = stats.output_shapes({"M": m, "D": d, "A": 64})
        assert shapes == {"h": (m, d), "out1": (m,), "out2": (-(-d // width), m)}


def test_check_keeps_no_tensors_and_numbers_are_scalars() -> None:
    artifact = Artifact(harness.library("bias_scale"))
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    args = [
        x,
        torch.zeros(16, 64, dtype=torch.bfloat16),
        None,
        torch.zeros(8),
        2.5,
        torch.zeros(8, 16, dtype=torch.bfloat16),
    ]
    assert artifact.check(args) is None
    alive = weakref.ref(x)
    del x, args
    gc.collect()
    assert alive() is None


def test_errors_are_of_the_thread(stats: Artifact) -> None:
    assert stats.check([None] * 6) == "operand 'o' is missing: bf16[M, A] is not optional"
    seen: list[bytes] = []
    thread = threading.Thread(target=lambda: seen.append(stats._functions.last_error()))
    thread.start()
    thread.join()
    assert seen == [b""]


def test_wrong_number_of_arguments(stats: Artifact) -> None:
    with pytest.raises(CodaError, match=r"'stats' takes 6 arguments \(o, w, x, h, out1, out2\), got 1"):
        stats.check([None])


def test_files_that_are_no_artifact(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(CodaError, match="is not a library that can be loaded"):
        Artifact(text)
    foreign = next(p for p in Path(torch.__file__).parent.glob("lib/libtorch_global_deps.so"))
    with pytest.raises(CodaError, match="is not an artifact of coda"):
        Artifact(foreign)


def test_formulas() -> None:
    assert formula("2*F + 3", {"F": 5}) == 13
    assert formula("B*T**2 - 1", {"B": 2, "T": 3}) == 17
    for bad in ("__import__('os')", "F.real", "G", "F / 2"):
        with pytest.raises(CodaError, match="cannot be computed"):
            formula(bad, {"F": 4})
