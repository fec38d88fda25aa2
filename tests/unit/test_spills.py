"""A variant that spills inside the k-loop is dropped for the next tile, and is not compiled twice."""

from __future__ import annotations

from pathlib import Path

import pytest

import coda.build as build
from coda.build.compile import SpillError
from coda.target import TILES, rank_tiles
from tests.support import RESIDUAL_STATS, program


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What stand-ins for the compilers were asked for; nvcc finds that all tiles but 128x160 spill."""
    asked: list[str] = []

    def compile_unit(folder: Path, file: str, *_: object) -> None:
        tile = next(t.name for t in TILES if f"gemm_{t.name}," in (folder / file).read_text())
        asked.append(tile)
        if tile != "128x160":
            raise SpillError.of(f"kernel at {tile} spills registers inside its k-loop")
        (folder / "device.cubin").write_bytes(b"code")
        (folder / "build.log").touch()

    def link(folder: Path, name: str, *_: object) -> None:
        asked.append("launcher")
        (folder / f"{name}.so").write_bytes(b"library")

    monkeypatch.setenv("CODA_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compile_unit", compile_unit)
    monkeypatch.setattr(build, "compile_host", lambda folder, tools: None)
    monkeypatch.setattr(build, "link", link)
    return asked


def test_the_next_tile_is_tried_and_rejections_are_remembered(compiled: list[str]) -> None:
    plan = build.as_schedule(program(RESIDUAL_STATS))
    first = [t.name for t in rank_tiles(plan.gemms[0])]
    path = build.library(plan, None, None, build.DEFAULT_ARCH)
    assert path.read_bytes() == b"library"
    tried = [*first[: first.index("128x160") + 1], "launcher"]
    assert compiled == tried
    assert build.library(plan, None, None, build.DEFAULT_ARCH) == path
    assert compiled == tried  # nothing was compiled again


def test_a_tile_that_was_asked_for_is_an_error(compiled: list[str]) -> None:
    plan = build.as_schedule(program(RESIDUAL_STATS))
    for _ in range(2):
        with pytest.raises(SpillError, match="128x128 spills registers inside its k-loop"):
            build.library(plan, "128x128", None, build.DEFAULT_ARCH)
    assert compiled == ["128x128"]


def test_another_order_of_tiles_is_another_launcher_over_the_same_device_code(compiled: list[str]) -> None:
    plan = build.as_schedule(program(RESIDUAL_STATS))
    paths = {build.library(plan, tile, None, build.DEFAULT_ARCH) for tile in ("128x160", "128x160_s4", "128x160_s8m")}
    assert len(paths) == 3
    assert compiled == ["128x160", "launcher", "launcher", "launcher"]
    for tile in ("128x128", "128x128_s4"):
        with pytest.raises(SpillError):
            build.library(plan, tile, None, build.DEFAULT_ARCH)
    assert compiled[4:] == ["128x128"]
