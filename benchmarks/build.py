"""Build the artifacts that benchmarks.run, .items and .block measure.

    python -m benchmarks.build .bench [--what programs items blocks] [--jobs 2]

``programs`` are those of programs.coda, each at each tile, as PROGRAM.TILE.so; ``items`` the kernels of a Llama layer,
as MODEL/KERNEL.TILE.so, each at the ``--best`` tiles that promise most at 8192 rows, in each order of tiles; ``blocks``
whole layers, forward and backward, as MODEL/block_PHASE.ROWS.so. Needs nvcc and no GPU. What is in the build cache is
not compiled again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ours
from benchmarks.models import ITEMS, MODELS
from benchmarks.workloads import PROGRAMS, WORKLOADS
from coda.build import build
from coda.errors import CodaError
from coda.frontend import load_path
from coda.ir import Program
from coda.printer import print_program
from coda.target import TILES, candidates, lower, parse_tile, rank_in
from coda.target.blocks import lower_program
from coda.target.legality import legal_tile

ROWS = 8192
BLOCK_ROWS = (8192, 32768)  # tiles are chosen for these; any artifact takes any number of rows


@dataclass(frozen=True)
class Job:
    """One artifact. The tile is None where the width formula chooses."""

    text: str  # programs travel between processes as text
    tile: str | None
    dims: dict[str, int]
    out: Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--what", nargs="+", choices=("programs", "items", "blocks"), default=["programs"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--items", nargs="+", choices=list(ITEMS), default=list(ITEMS))
    parser.add_argument("--tiles", nargs="+", default=[tile.name for tile in TILES], help="of the programs")
    parser.add_argument("--best", type=int, default=1, help="how many tiles of each item")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    jobs = list(itertools.chain(*(JOBS[what](args) for what in args.what)))
    start = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        failed = [line for line in pool.map(_build, jobs) if line]
    print("\n".join(failed))
    print(f"{len(jobs) - len(failed)} of {len(jobs)} artifacts in {time.monotonic() - start:.0f} s")
    return int(bool(failed))


def _programs(args: argparse.Namespace) -> Iterator[Job]:
    plans = {name: (program, lower(program)) for name, program in load_path(PROGRAMS).programs.items()}
    for name, tile in itertools.product(args.workloads, args.tiles):
        program, plan = plans[name]
        if legal_tile(parse_tile(tile), plan):
            yield Job(print_program(program), tile, {}, args.folder / f"{name}.{tile}.so")


def _items(args: argparse.Namespace) -> Iterator[Job]:
    for model in (MODELS[name] for name in args.models):
        kernels: Sequence[Program] = [k for name in args.items for k in ours.kernels(model).get(name, ())]
        for kernel in kernels:
            dims = ours.sizes_of(model, ROWS)
            schedule = lower_program(kernel)
            leader = schedule.gemms[0]  # a launch of several products has one tile
            # No kernel spills at the first of all tiles.
            best = {tile.kernel for tile in (*rank_in(schedule, leader, dims)[: args.best], TILES[0])}
            for tile in (t for t in candidates(leader, dims) if t.kernel in best):
                yield Job(print_program(kernel), tile.name, dims, ours.file(args.folder, model, kernel, tile.name))


def _blocks(args: argparse.Namespace) -> Iterator[Job]:
    for model, rows in itertools.product((MODELS[name] for name in args.models), BLOCK_ROWS):
        for phase, program in ours.phases(model).items():
            out = ours.block_file(args.folder, model, phase, rows)
            yield Job(print_program(program), None, ours.sizes_of(model, rows), out)


JOBS = {"programs": _programs, "items": _items, "blocks": _blocks}


def _build(job: Job) -> str | None:
    """Build one artifact; what is wrong, as a line, when that fails."""
    import coda

    try:
        (program,) = coda.parse(job.text).programs.values()
        build(program, job.tile, job.out, dims=job.dims)
    except CodaError as error:
        return f"{job.out}: {' '.join(str(error).split())[:300]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
