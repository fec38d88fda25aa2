"""How long one kernel takes to compile, cold, on one core: no cache, device and host compiler on the same core.

    python -m benchmarks.compile_time            # writes one JSON into benchmarks/results/compile

Needs nvcc and no GPU. The aim is 35 s; CUTLASS's own epilogue visitor trees take 85 s (measured.md of the design).
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.records import RESULTS, Row, write
from benchmarks.workloads import PROGRAMS


def main() -> int:
    from coda.build import toolchain
    from coda.frontend import load_path
    from coda.target import choose_tile, lower
    from coda.version import __version__

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the compilers inherit it
    rows = []
    for name, program in load_path(PROGRAMS).programs.items():
        tile = choose_tile(lower(program), {})
        seconds = cold_build(program, tile)
        print(f"{name:20s} {tile.name:10s} {seconds:5.1f} s", flush=True)
        measured = (1e3 * seconds, 1.0, (1.0, 1.0), 1, None)
        rows.append(Row("compile", name, None, 0, 0, 0, "bf16", "coda", tile.name, *measured))
    tools = toolchain.find()
    versions = {"coda": __version__, "nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version}
    command = shlex.join(["python", "-m", "benchmarks.compile_time", *sys.argv[1:]])
    print(f"wrote {write(rows, f'one core of {processor()}', versions, command, RESULTS / 'compile')}")
    return 0


def cold_build(program, tile) -> float:
    """Wall seconds of a build that finds nothing in the cache."""
    from coda.build import build

    with tempfile.TemporaryDirectory() as cache:
        os.environ["CODA_CACHE"] = cache
        start = time.monotonic()
        build(program, tiles=tile)
        return time.monotonic() - start


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
