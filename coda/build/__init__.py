"""From a program to a shared library: sources, compiler runs, cache.

``sources`` writes text and needs no compiler; ``build`` makes ``NAME.so`` and ``NAME.h``; ``artifact`` makes or finds
a library in the cache and loads it; ``load`` opens one that was built before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coda.build import cache, toolchain
from coda.build.compile import (
    CORES,
    CUBIN,
    DEVICE_FLAGS,
    HOST_FLAGS,
    LINK_FLAGS,
    SpillError,
    arch_flags,
    compile_host,
    compile_unit,
    link,
)
from coda.build.describe import Metadata
from coda.build.host import header, host_source
from coda.build.toolchain import Toolchain
from coda.build.units import Unit, units
from coda.errors import CodaError
from coda.ir import Program
from coda.resources import templates_dir
from coda.target import Plan, Tile, Variant, parse_tile, rank_in, variants
from coda.target.blocks import lower_program
from coda.target.chunks import lower_along
from coda.target.legality import legal_tile
from coda.target.schedule import Assembly, Kernel, Schedule
from coda.version import __version__

if TYPE_CHECKING:
    from coda.runtime.library import Artifact

DEFAULT_ARCH = "sm_90a"
Progress = Callable[[str], None]
Tiles = Sequence[Tile | str] | Tile | str | None
TilesFor = Callable[[Schedule, Mapping[str, int]], Mapping[str, Tile]]  # measured to be best at these sizes, by kernel


def artifact(
    program: Program,
    dims: Mapping[str, int] | None = None,
    tile: Tiles = None,
    progress: Progress | None = None,
    numerics: str = "fused",
    chunk: str | None = None,
    measured: TilesFor | None = None,
) -> Artifact:
    """The loaded kernels of a program, from the cache or built now. ``dims`` guide the choice of the tiles, as does
    ``measured``. With ``chunk`` the kernels run in chunks of the axis of this name."""
    from coda.runtime.library import Artifact

    schedule = lowered(program, numerics, chunk, dims)
    chosen = measured(schedule, dims or {}) if measured and tile is None else {}
    return Artifact(library(schedule, tile, dims, DEFAULT_ARCH, progress, chosen), program=program)


def lowered(
    program: Program, numerics: str = "fused", chunk: str | None = None, dims: Mapping[str, int] | None = None
) -> Schedule:
    """The kernels of a program, in chunks of an axis where that is named. Raises CodaError where it has none. Of
    ``dims`` the sizes of heads become part of the kernels."""
    return lower_along(program, chunk, numerics, dims).schedule


def load(path: str | Path, program: str | None = None) -> Artifact:
    """An artifact that ``build`` or ``coda lower`` wrote; ``program`` chooses where it has several."""
    from coda.runtime.library import Artifact

    return Artifact(Path(path), program)


def build(
    program: Program | Kernel | Schedule,
    tiles: Tiles = None,
    out: Path | None = None,
    keep_sources: Path | None = None,
    arch: str = DEFAULT_ARCH,
    progress: Progress | None = None,
    dims: Mapping[str, int] | None = None,
    chosen: Mapping[str, Tile] | None = None,
) -> Path:
    """Build ``NAME.so``. With ``out`` the library and its header (OUT with suffix .h) are copied there."""
    job = Job(as_schedule(program, dims), dims or {}, tiles, chosen or {})
    return build_all(job.schedule.name, [job], out, keep_sources, arch, progress)


def build_all(
    name: str,
    jobs: Sequence[Job],
    out: Path | None = None,
    keep_sources: Path | None = None,
    arch: str = DEFAULT_ARCH,
    progress: Progress | None = None,
) -> Path:
    """Build ``NAME.so`` with several programs, a forward and its backward, say. ``out`` as for ``build``."""
    built = library_of(name, jobs, arch, progress)
    if keep_sources is not None:
        keep_sources.mkdir(parents=True, exist_ok=True)
        for file in sorted(built.parent.iterdir()):
            if file.suffix in (".cu", ".cpp", ".h", ".S", ".log"):
                shutil.copy(file, keep_sources / file.name)
    if out is None:
        return built
    out.parent.mkdir(parents=True, exist_ok=True)
    _copy_whole(built, out)
    _copy_whole(built.with_suffix(".h"), out.with_suffix(".h"))
    return out


def sources(assembly: Assembly, meta: Metadata | None = None) -> dict[str, str]:
    """File name -> text of everything that is compiled."""
    return sources_of(assembly.name, [assembly], meta)


def sources_of(name: str, assemblies: Sequence[Assembly], meta: Metadata | None = None) -> dict[str, str]:
    """The same of a library of several programs."""
    device = {unit.file: unit.text for unit in units(assemblies)}
    return device | _host_sources(name, assemblies, meta or Metadata())


def _host_sources(name: str, assemblies: Sequence[Assembly], meta: Metadata) -> dict[str, str]:
    return {
        "host.cpp": host_source(name, assemblies, meta),
        f"{name}.h": header(name, [assembly.schedule for assembly in assemblies]),
    }


def variants_of(plan: Plan, tiles: Sequence[Tile]) -> list[Variant]:
    """The plan at each tile. Raises CodaError for a tile that is not legal (case M4)."""
    for tile in tiles:
        legal = legal_tile(tile, plan)
        if not legal:
            raise CodaError.of(str(legal))
    return variants(plan, tiles)


def assemble(
    schedule: Schedule,
    tiles: Tiles = None,
    dims: Mapping[str, int] | None = None,
    chosen: Mapping[str, Tile] | None = None,
) -> Assembly:
    """The schedule with tiles as given, the same for all its products; by default the one ``chosen`` for a kernel by
    measuring, else by the width formula."""
    job = Job(schedule, dims or {}, tiles, chosen or {})
    return job.assembly(job.ranked())


@dataclass(frozen=True)
class Job:
    """A program of a library: its kernels, the sizes that guide their tiles, or the tiles themselves: ``tiles`` for all
    products, or those ``chosen`` for some of them by measuring."""

    schedule: Schedule
    dims: Mapping[str, int] = field(default_factory=dict)
    tiles: Tiles = None
    chosen: Mapping[str, Tile] = field(default_factory=dict)

    def ranked(self) -> dict[str, list[Tile]]:
        """The tiles to try for each product, the most promising first; none where they are given."""
        if self.tiles is not None:
            return {}
        first = {name: [tile] for name, tile in self.chosen.items()}
        schedule = self.schedule
        return {plan.name: first.get(plan.name, []) + rank_in(schedule, plan, self.dims) for plan in schedule.gemms}

    def assembly(self, ranked: Mapping[str, Sequence[Tile]]) -> Assembly:
        """The schedule at the tiles that are given, or come first."""
        tiles = {name: found[:1] for name, found in ranked.items()}
        if self.tiles is not None:
            tiles = {plan.name: as_tiles(self.tiles) for plan in self.schedule.gemms}
        built = (v for plan in self.schedule.gemms for v in variants_of(plan, tiles[plan.name]))
        return Assembly(self.schedule, tuple(built))


def library(
    schedule: Schedule,
    tiles: Tiles,
    dims: Mapping[str, int] | None,
    arch: str,
    progress: Progress | None = None,
    chosen: Mapping[str, Tile] | None = None,
) -> Path:
    """The library of a schedule at the tiles given; by default at the tile ``chosen`` for a kernel by measuring, else
    at the most promising one that does not spill."""
    return library_of(schedule.name, [Job(schedule, dims or {}, tiles, chosen or {})], arch, progress)


def library_of(name: str, jobs: Sequence[Job], arch: str, progress: Progress | None = None) -> Path:
    """The library of several programs, each at tiles as for ``library``."""
    ranked = {plan: tiles for job in jobs for plan, tiles in job.ranked().items()}
    while True:
        assemblies = [job.assembly(ranked) for job in jobs]
        try:
            return cached_of(name, assemblies, arch, progress)
        except SpillError as error:
            free = [v for assembly in assemblies for v in assembly.variants if v.plan.name in ranked]
            spilled = [v.plan.name for v in free if v.symbol in str(error)] or [v.plan.name for v in free]
            for plan in spilled:
                ranked[plan] = ranked[plan][1:]
            if not ranked or not all(ranked.values()):
                raise
            if progress:
                progress(f"{error.diagnostics[0].message}; trying the next tile")


def cached(assembly: Assembly, arch: str, progress: Progress | None = None) -> Path:
    """The library of one program in the cache, built if it is not there yet."""
    return cached_of(assembly.name, [assembly], arch, progress)


def cached_of(name: str, assemblies: Sequence[Assembly], arch: str, progress: Progress | None = None) -> Path:
    """The library in the cache, built if it is not there yet. Device code has an entry of its own: what only the
    launcher knows, such as the order of tiles, changes without it being compiled again."""
    if arch != DEFAULT_ARCH:
        raise CodaError.of(f"there is no code for {arch}", f"this release builds for {DEFAULT_ARCH}")
    tools = toolchain.find()
    device = units(assemblies)
    host = _host_sources(name, assemblies, Metadata(arch, tools.cutlass_version, tools.nvcc_version))

    def make(folder: Path) -> None:
        for file, text in host.items():
            (folder / file).write_text(text)
        with ThreadPoolExecutor(CORES) as pool:
            cubins = [pool.submit(_cubin, unit, tools, arch, progress) for unit in device]
            compile_host(folder, tools)
            folders = [cubin.result() for cubin in cubins]
        for unit, built in zip(device, folders, strict=True):
            for file in (unit.file, "build.log"):
                shutil.copy(built / file, folder / Path(unit.file).with_suffix(Path(file).suffix))
        link(folder, name, tools, [built / CUBIN for built in folders])

    files = {unit.file: unit.text for unit in device} | host
    return cache.obtain(cache.content_key(_identity(files, tools, arch)), f"{name}.so", make) / f"{name}.so"


def _cubin(unit: Unit, tools: Toolchain, arch: str, progress: Progress | None) -> Path:
    """The folder in the cache with the cubin of a unit, compiled if it is not there yet."""

    def make(folder: Path) -> None:
        (folder / unit.file).write_text(unit.text)
        compile_unit(folder, unit.file, tools, arch, progress or (lambda message: None))

    key = cache.content_key(_device_identity(unit, tools, arch))
    if (reason := cache.rejection(key)) is not None:
        raise SpillError.of(reason, "choose a smaller tile")
    try:
        return cache.obtain(key, CUBIN, make)
    except SpillError as error:
        cache.reject(key, error.diagnostics[0].message)
        raise


def as_schedule(program: Program | Kernel | Schedule, dims: Mapping[str, int] | None = None) -> Schedule:
    """The kernels of a program, or those that were made of it before."""
    if isinstance(program, Program):
        return lower_program(program, sizes=dims)
    return program if isinstance(program, Schedule) else Schedule.of(program)


def as_tiles(tiles: Tile | str | Sequence[Tile | str]) -> list[Tile]:
    """Tiles as given, by name or as objects."""
    given = [tiles] if isinstance(tiles, (Tile, str)) else tiles
    return [t if isinstance(t, Tile) else parse_tile(t) for t in given]


def _identity(files: Mapping[str, str], tools: Toolchain, arch: str) -> dict[str, str]:
    """Everything an artifact depends on: generated text, templates, flags, tools, versions (case N3)."""
    return {
        **{f"source/{name}": text for name, text in files.items()},
        **_templates("**/*.h"),
        **_tools(tools),
        "flags": repr((DEVICE_FLAGS, arch_flags(arch), HOST_FLAGS, LINK_FLAGS)),
    }


def _device_identity(unit: Unit, tools: Toolchain, arch: str) -> dict[str, str]:
    """Everything a unit of device code depends on: the same without templates/host, which is the launcher's."""
    return {
        f"source/{unit.file}": unit.text,
        **_templates("*.h"),
        **_tools(tools),
        "flags": repr((DEVICE_FLAGS, arch_flags(arch))),
    }


def _tools(tools: Toolchain) -> dict[str, str]:
    """The host compiler preprocesses device code, too."""
    versions = {"nvcc": tools.nvcc_version, "cxx": tools.cxx_version, "cutlass": tools.cutlass_version}
    return versions | {"coda": __version__}


def _templates(pattern: str) -> dict[str, str]:
    found = sorted(templates_dir().glob(pattern))
    return {f"templates/{path.relative_to(templates_dir())}": path.read_text() for path in found}


def _copy_whole(source: Path, target: Path) -> None:
    """A reader of the target sees the old file or the new one; a library in use is replaced, never overwritten."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy(source, partial)
    partial.replace(target)
