"""What the kernels of a layer move: the bytes that explain predicts beside those that Nsight Compute counts.

    python -m benchmarks.build .bench --what blocks --jobs 16
    python -m benchmarks.traffic --models Llama-3-8B        # needs a GPU and ncu

Each kernel is profiled as it runs in the chain, its caches as the one before left them. Prediction counts each operand
of a kernel once; what is still in the L2 comes for less.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks import block, layer, ours
from benchmarks.models import MODELS
from benchmarks.run import ROOT
from coda.cli.report import Side
from coda.cost import GPUS

PHASES = ("forward", "backward")
METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written", "gpu__time_duration.sum": "time"}
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3,
         "nsecond": 1e-6, "usecond": 1e-3, "msecond": 1.0, "second": 1e3}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--artifacts", type=Path, default=ROOT / ".bench", help="what benchmarks.build made")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--once", choices=list(MODELS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.once:
        once(args.once, args.rows, args.artifacts)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None or not torch.cuda.is_available():
        print("benchmarks.traffic needs a GPU and ncu, the command of Nsight Compute", file=sys.stderr)
        return 2
    for model in args.models:
        child = [sys.executable, "-m", "benchmarks.traffic", "--once", model, "--rows", str(args.rows),
                 "--artifacts", str(args.artifacts.resolve())]  # fmt: skip
        options = ["--csv", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        command = [ncu, *options, "--metrics", ",".join(METRICS), *child]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"{model}: ncu failed:\n{(result.stdout + result.stderr)[-2000:]}", file=sys.stderr)
            return 1
        show(model, args.rows, args.artifacts, list(kernels(result.stdout.splitlines())))
    return 0


def once(model: str, rows: int, folder: Path) -> None:
    """One call of forward and backward, warm, between the marks that ncu looks for."""
    size = MODELS[model]
    artifacts = block.load(size, rows, folder)
    used = [artifacts[phase] for phase in PHASES if phase in artifacts]
    call = block.chain(used, block.ours_of(layer.operands(size, rows, 0, "cuda"), size))
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def kernels(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Name, and bytes and milliseconds, of each kernel in ncu's CSV, in the order in which they ran."""
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in table:
        values = found.setdefault(row["ID"], (row["Kernel Name"], {}))[1]
        value = float(row["Metric Value"].replace(",", ""))
        values[METRICS[row["Metric Name"]]] = value * UNITS[row["Metric Unit"]]
    yield from found.values()


def show(model: str, rows: int, folder: Path, measured: list[tuple[str, dict[str, float]]]) -> None:
    size, programs = MODELS[model], ours.block(MODELS[model])
    used = [programs[p] for p in PHASES if ours.block_file(folder, size, p, rows).exists()]
    sides = [Side.of(program, ours.known(program, size, rows)) for program in used]
    predicted = [(x, side.sizes) for side in sides for x in side.launches for _ in range(x.count)]
    print(f"{model}, M={rows}: {len(predicted)} launches predicted, {len(measured)} seen")
    print(f"  {'launch':34s} {'predicted MB':>12s} {'read':>8s} {'written':>8s} {'floor ms':>9s} {'ms':>7s}")
    for (launch, sizes), (name, values) in zip(predicted, measured, strict=False):
        document = launch.document(sizes, GPUS["h200"])
        read, written, floor = values["read"] / 1e6, values["written"] / 1e6, document["floor_ms"]
        print(f"  {launch.name[-34:]:34s} {document['bytes'] / 1e6:12.1f} {read:8.1f} {written:8.1f} {floor:9.3f} "
              f"{values['time']:7.3f}  {name[:40]}")  # fmt: skip
    moved = sum(values["read"] + values["written"] for _, values in measured)
    print(f"  in all {sum(side.moved() or 0 for side in sides) / 1e9:.2f} GB predicted, {moved / 1e9:.2f} GB moved")


if __name__ == "__main__":
    sys.exit(main())
