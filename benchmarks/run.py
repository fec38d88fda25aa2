"""Measure fused kernels beside cuBLAS and torch.compile on this machine's GPU, interleaved in one process.

    python -m benchmarks.build .bench                 # anywhere with nvcc: one artifact for each program and tile
    python -m benchmarks.run --artifacts .bench       # on the GPU: measures, writes one JSON into benchmarks/results
    python -m benchmarks.table                        # the table of README.md, from the JSON files

All candidates of a shape run in the same shuffled rounds (see coda/runtime/timing.py), over inputs that are rotated
through more memory than the L2 holds. Each is first checked against float64: nothing that is wrong by more than twice
the error of eager torch is timed. The baseline is torch.matmul of the same product: cuBLAS without any epilogue.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.records import RESULTS, Row, write
from benchmarks.workloads import SHAPES, WORKLOADS, Workload, operands, relative_errors
from coda.runtime.device import driver_version
from coda.runtime.timing import CudaTimer, interleave, rotating, rotation

ROOT = Path(__file__).resolve().parent.parent
GATE = 2.0  # largest error allowed, in units of eager torch's error
Math = Callable[..., tuple[Tensor, ...]]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--artifacts", type=Path, default=ROOT / ".bench", help="folder of PROGRAM.TILE.so files")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--shapes", nargs="+", type=shape, default=list(SHAPES), metavar="MxNxK")
    parser.add_argument("--tiles", nargs="+", help="only these tiles (default: all that were built)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--rounds", type=int, default=30, help="at most this many rounds a shape")
    parser.add_argument("--budget", type=float, default=300, help="seconds for the whole run, shared by the shapes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args(argv)


def shape(text: str) -> tuple[int, int, int]:
    m, n, k = (int(size) for size in text.split("x"))
    return m, n, k


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("benchmarks.run measures on a GPU, and there is none here", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    rows: list[Row] = []
    end = time.monotonic() + args.budget
    for index, (m, n, k) in enumerate(args.shapes):
        seconds = max(0.0, end - time.monotonic()) / (len(args.shapes) - index)
        rows += measure_shape(m, n, k, args, seconds)
        torch.cuda.empty_cache()
    command = shlex.join(["python", "-m", "benchmarks.run", *(sys.argv[1:] if argv is None else argv)])
    path = write(rows, device_name(), versions(), command, args.out)
    print(f"wrote {path}")
    return 0


def measure_shape(m: int, n: int, k: int, args: argparse.Namespace, seconds: float) -> list[Row]:
    """Check, then time, every candidate of every workload at one shape."""
    start = time.monotonic()
    sets = [operands(m, n, k, seed, "cuda") for seed in range(rotation(2 * (m * k + n * k)))]
    calls: dict[tuple[str, str, str | None], Callable[[], object]] = {}
    errors: dict[tuple[str, str, str | None], float] = {}
    for name in (name for name in args.workloads if WORKLOADS[name].at(n)):
        workload = WORKLOADS[name]
        want, limit = reference(workload, sets[0])
        for impl, tile, function in candidates(workload, args):
            error = check(function, workload, sets[0], want)
            if not error <= limit:  # NaN too
                print(f"  {name} {impl} {tile or ''}: error {error:.2e} is over the gate {limit:.2e}; not timed")
                continue
            calls[name, impl, tile] = rotating(function, in_order(workload, sets))
            errors[name, impl, tile] = error
        del want
    baseline = ("", "cublas", None)
    calls[baseline] = rotating(lambda x, w: torch.matmul(x, w.T), in_order(WORKLOADS["gemm"], sets))
    left = seconds - (time.monotonic() - start)
    measured = interleave(calls, baseline, CudaTimer(), args.rounds, left)

    cublas = measured.pop(baseline)
    tflops = 2 * m * n * k / cublas.median_ms / 1e9
    print(f"M={m} N={n} K={k}: cuBLAS {cublas.median_ms:.3f} ms, {tflops:.0f} TFLOP/s, {cublas.rounds} rounds")
    rows = [Row("gemm", "forward", None, m, n, k, "bf16", "cublas", None, cublas.median_ms, 1.0,
                cublas.ratio_quartiles, cublas.rounds, None)]  # fmt: skip
    for (name, impl, tile), result in sorted(measured.items(), key=lambda item: (item[0][0], item[1].ratio)):
        print(f"  {name:20s} {impl:14s} {tile or '':12s} {result.median_ms:8.3f} ms  ratio {result.ratio:.3f}")
        rows.append(
            Row(name, "forward", None, m, n, k, "bf16", impl, tile, result.median_ms, result.ratio,
                result.ratio_quartiles, result.rounds, errors[name, impl, tile])
        )  # fmt: skip
    return rows


def in_order(workload: Workload, sets: list[dict[str, Tensor]]) -> list[tuple[Tensor, ...]]:
    """The operands of the workload, of each set."""
    return [tuple(s[name] for name in workload.operands) for s in sets]


def candidates(workload: Workload, args: argparse.Namespace) -> Iterator[tuple[str, str | None, Math]]:
    """(implementation, tile, function) for everything that computes the workload."""
    for path in sorted(args.artifacts.glob(f"{workload.name}.*.so")):
        tile = path.name.split(".")[1]
        if not args.tiles or tile in args.tiles:
            yield "coda", tile, load(path)
    if not args.no_compile:
        torch._dynamo.reset()
        yield "torch.compile", None, torch.compile(workload.math, dynamic=False)


def load(path: Path) -> Math:
    """An artifact as a function, by its own entry point: what is timed is the kernel, not argument handling."""
    from coda.build import load as load_artifact
    from coda.dtypes import torch_dtype
    from coda.runtime.binding import bind, shapes_of

    artifact = load_artifact(path)
    program = artifact.program
    results: dict[tuple[torch.Size, ...], list[tuple[tuple[int, ...], torch.dtype]]] = {}

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        key = tuple(x.shape for x in inputs)
        if key not in results:
            sizes = bind(program, shapes_of(dict(zip((p.name for p in program.params), inputs, strict=True))))
            shapes = artifact.output_shapes(sizes)
            results[key] = [(tuple(shapes[o.name]), torch_dtype(o.type.dtype)) for o in program.outputs]
        outputs = tuple(torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in results[key])
        artifact.run([*inputs, *outputs])
        return outputs

    return call


def reference(workload: Workload, inputs: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], float]:
    """The float64 results, and the largest error a candidate may have."""
    names = workload.operands
    want = workload.math(*(wide(inputs[name]) for name in names))
    eager = workload.math(*(inputs[name] for name in names))
    return want, GATE * max(relative_errors(eager, want))


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def check(function: Math, workload: Workload, inputs: dict[str, Tensor], want: tuple[Tensor, ...]) -> float:
    """The largest relative error of a candidate's outputs; NaN where one was not written whole."""
    poison(want)
    got = function(*(inputs[name] for name in workload.operands))
    return max(relative_errors(got, want), key=lambda error: math.inf if math.isnan(error) else error)


def poison(like: tuple[Tensor, ...]) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that an element not written shows."""
    blocks = [torch.full(t.shape, math.nan, dtype=torch.bfloat16, device=t.device) for t in like]
    blocks += [torch.full(t.shape, math.nan, dtype=torch.float32, device=t.device) for t in like if t.dim() == 1]
    del blocks


def device_name() -> str:
    return torch.cuda.get_device_name()


def versions() -> dict[str, str]:
    from coda.version import __version__

    found = {"coda": __version__, "torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if driver := driver_version():
        found["driver"] = driver
    return found


if __name__ == "__main__":
    sys.exit(main())
