"""Build the artifacts that benchmarks.run measures: PROGRAM.TILE.so for each program of programs.coda and each tile.

    python -m benchmarks.build .bench [--workloads gemm swiglu] [--tiles 128x128 128x192] [--jobs 2]

Needs nvcc and no GPU. What is in the build cache already is not compiled again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.workloads import PROGRAMS, WORKLOADS
from coda.cli import main as coda
from coda.frontend import load_path
from coda.target import TILES, lower, parse_tile
from coda.target.legality import legal_tile


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--tiles", nargs="+", default=[tile.name for tile in TILES])
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    plans = {name: lower(program) for name, program in load_path(PROGRAMS).programs.items()}
    pairs = itertools.product(args.workloads, args.tiles)
    wanted = [(name, tile, args.folder) for name, tile in pairs if legal_tile(parse_tile(tile), plans[name])]
    with ProcessPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(_build, wanted))
    return int(any(codes))


def _build(job: tuple[str, str, Path]) -> int:
    name, tile, folder = job
    return coda(["lower", str(PROGRAMS), "--program", name, "--tile", tile, "-o", str(folder / f"{name}.{tile}.so")])


if __name__ == "__main__":
    sys.exit(main())
