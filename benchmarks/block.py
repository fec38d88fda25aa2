"""Measure what lies between two attentions of a Llama, forward and with its backward, beside its bare products, eager
PyTorch, torch.compile and Liger, in one run.

    python -m benchmarks.build .bench --what blocks --jobs 16
    python -m benchmarks.block --peers /tmp/peers

Prints for each model and number of rows: the launches of coda's artifacts, as predicted and as the profiler saw them,
the bytes they move by prediction; the time relative to the bare products (gate and up merged, q, k and v merged; in
the backward two for each of the forward), of calls and of replays of a CUDA graph; the host's time of a call; the peak
of memory beyond the operands. dRoPE, which the times of all contain, is also timed alone.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import coda
from benchmarks import eager, layer, ours
from benchmarks.memory import peak_bytes
from benchmarks.models import MODELS, Model
from benchmarks.records import RESULTS, Row, write
from benchmarks.run import ROOT, device_name, versions
from coda.cli.report import Side
from coda.errors import CodaError
from coda.pytorch.backend import coda as coda_backend
from coda.runtime.callable import CompiledProgram
from coda.runtime.timing import CudaTimer, interleave

CHECKED_ROWS = 512
GATE = 2.0
HOST_CALLS = 20
Call = Callable[[], object]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--artifacts", type=Path, default=ROOT / ".bench", help="what benchmarks.build made")
    parser.add_argument("--peers", type=Path, help="where benchmarks/peers/install.sh put them: for Liger")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=30, help="at most; 0 only warms the caches of torch.compile")
    parser.add_argument("--budget", type=float, default=80, help="seconds for all rounds")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--backend", action="store_true", help="also torch.compile with backend='coda', which builds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.block measures on a GPU, and there is none here", file=sys.stderr)
        return 2
    if args.peers is not None:
        sys.path.append(str(args.peers / "site"))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    rows: list[Row] = []
    for name in args.models:
        for count in args.rows:
            rows += measure(MODELS[name], count, args, args.budget / len(args.models) / len(args.rows))
            torch.cuda.empty_cache()
    if rows:
        command = shlex.join(["python", "-m", "benchmarks.block", *(sys.argv[1:] if argv is None else argv)])
        print(f"wrote {write(rows, device_name(), versions(), command, args.out)}")
    return 0


def measure(model: Model, rows: int, args: argparse.Namespace, seconds: float) -> list[Row]:
    """Both phases of one model and number of rows."""
    torch._dynamo.reset()
    artifacts = load(model, rows, args.artifacts)
    print(f"{model.name}, M={rows}", flush=True)
    check(model, artifacts)
    operands = layer.operands(model, rows, 0, "cuda")
    found = []
    for phase in ("forward", "forward+backward"):
        offered = {name: warm(name, make) for name, make in candidates(phase, model, operands, artifacts, args)}
        calls = {name: call for name, call in offered.items() if call is not None}
        if not args.rounds:
            continue
        for name in [n for n in calls if n.startswith("coda")][:1]:
            launches(model, rows, phase, calls[name])
        share = seconds * (0.3 if phase == "forward" else 0.7)
        measured = interleave(calls, "cublas", CudaTimer(), args.rounds, share)
        print(f"  {phase}: products alone {measured['cublas'].median_ms:.3f} ms, {measured['cublas'].rounds} rounds")
        for name, result in measured.items():
            low, high = result.ratio_quartiles
            host, peak = host_time(calls[name]), peak_bytes(calls[name])
            print(f"    {name:14s} {result.median_ms:8.3f} ms  {result.ratio:.3f} ({low:.3f} to {high:.3f})"
                  f"  host {host:6.0f} us  peak {peak / 2**30:6.2f} GiB", flush=True)  # fmt: skip
            found.append(Row("block", phase, model.name, rows, 0, 0, "bf16", name, None, result.median_ms, result.ratio,
                             result.ratio_quartiles, result.rounds, None, host, peak))  # fmt: skip
    return found


def load(model: Model, rows: int, folder: Path) -> dict[str, CompiledProgram]:
    """The artifacts of a block by phase; one that was not built is missing, and why is told by benchmarks.build."""
    found = {}
    for phase in ours.phases(model):
        path = ours.block_file(folder, model, phase, rows)
        if path.exists():
            found[phase] = coda.load(path, fallback="strict")
        else:
            print(f"  {path} is missing: benchmarks.build says why")
    return found


def warm(name: str, make: Callable[[], Call]) -> Call | None:
    """Make a candidate and run it twice, so that all is compiled. One that fails is left out, and said so."""
    try:
        call = make()
        call()
        call()
        torch.cuda.synchronize()
    except Exception as error:  # of any kind: the others are still worth measuring
        print(f"  {name} is left out: {' '.join(str(error).split())[:300]}", flush=True)
        return None
    return call


def candidates(
    phase: str, model: Model, x: dict[str, Tensor], artifacts: Mapping[str, CompiledProgram], args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """What makes the calls that compute a phase, by name. ``x`` holds operands, and gradients of results as d_NAME."""
    backward = phase != "forward"
    run = training if backward else inference
    yield "cublas", lambda: products(model, x, backward)
    yield "eager", lambda: run(layer.forward, model, layer.TORCH, x)
    if not args.no_compile:
        yield "torch.compile", lambda: run(torch.compile(layer.forward, dynamic=False), model, layer.TORCH, x)
    if args.peers is not None:
        yield "liger", lambda: run(layer.forward, model, layer.liger(), x)
    needed = ("forward", "backward") if backward else ("inference",)
    if all(n in artifacts for n in needed):
        call = chain([artifacts[n] for n in needed], ours_of(x, model))
        yield "coda", lambda: call
        yield "coda, graph", lambda: graph(call)
        if backward and "drope" in artifacts:
            yield "coda's dRoPE", lambda: alone(artifacts["drope"], call())
    if args.backend:
        compiled = partial(torch.compile, layer.forward, dynamic=False, backend=coda_backend)
        yield "coda, torch.compile", lambda: run(compiled(), model, layer.TORCH, x)


def products(model: Model, x: dict[str, Tensor], backward: bool) -> Call:
    """The bare products: cuBLAS. Their operands are no results of each other, so that each can be what it likes."""
    y, z, qkv = (torch.randn(len(x["x"]), n, device="cuda", dtype=torch.bfloat16)
                 for n in (model.ffn, 2 * model.ffn, model.qkv))  # fmt: skip
    pairs = [(x["o"], x["w_o"], x["d_out"]), (x["x"], x["w_gate_up"], z), (y, x["w_down"], x["d_out"]),
             (x["x"], x["w_qkv"], qkv)]  # fmt: skip

    def call() -> None:
        for a, w, _ in pairs:
            torch.matmul(a, w.T)
        for a, w, g in reversed(pairs) if backward else ():
            torch.matmul(g, w)
            torch.matmul(g.T, a)

    return call


def inference(function: Callable[..., Any], model: Model, ops: layer.Ops, x: dict[str, Tensor]) -> Call:
    def call() -> object:
        with torch.no_grad():
            return function(x, model, ops)

    return call


def training(function: Callable[..., Any], model: Model, ops: layer.Ops, x: dict[str, Tensor]) -> Call:
    """Forward, and the gradients of all weights and activations."""
    wanted = {name: x[name].detach().requires_grad_() for name in layer.DIFFERENTIABLE}
    inputs, gradients = {**x, **wanted}, [x[f"d_{name}"] for name in layer.RESULTS]

    def call() -> object:
        return torch.autograd.grad(function(inputs, model, ops), list(wanted.values()), gradients)

    return call


def ours_of(x: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """The operands as the block program names them: gate and up, and q, k and v, are parts of the merged weights."""
    gate, up = x["w_gate_up"].chunk(2)
    sizes = [n * model.head_dim for n in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = x["w_qkv"].split(sizes)
    return {**x, "w_gate": gate, "w_up": up, "w_q": q, "w_k": k, "w_v": v}


def chain(programs: list[CompiledProgram], known: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Call programs one after the other; each takes operands and what those before it returned, by name."""

    def call() -> dict[str, Tensor]:
        values = dict(known)
        for program in programs:
            given = [values.get(p.name, p.default) for p in program.program.params]
            values.update(zip((o.name for o in program.program.outputs), program(*given), strict=True))
        return values

    return call


def alone(kernel: CompiledProgram, values: Mapping[str, Tensor]) -> Call:
    """A kernel of a block, on values of a call of all."""
    given = {p.name: values[p.name] for p in kernel.program.params if p.name in values}
    return lambda: kernel(**given)


def graph(call: Call) -> Call:
    """Replays of a call that was captured."""
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    return captured.replay


# -- checks and counts -------------------------------------------------------------------------------------------------


def check(
    model: Model, artifacts: Mapping[str, CompiledProgram], rows: int = CHECKED_ROWS, device: str = "cuda"
) -> None:
    """Results and gradients against float64; an artifact that is wrong by more than twice the error of eager torch
    is not measured. Raises CodaError with the table of errors."""
    x = layer.operands(model, rows, 1, device)
    plain, exact = (reference(model, {n: convert(t) for n, t in x.items()}) for convert in (lambda t: t, eager.wide))
    for phases in (("inference",), ("forward", "backward")):
        if not all(p in artifacts for p in phases):
            continue
        got = merged(chain([artifacts[p] for p in phases], ours_of(x, model))())
        names = [n for n in exact if n in got and (phases[-1] == "backward" or not n.startswith("d_"))]
        errors, limits = (eager.relative_errors({n: r[n] for n in names}, exact) for r in (got, plain))
        wrong = [n for n in names if not errors[n] <= GATE * limits[n]]
        worst = max(names, key=lambda n: errors[n] / limits[n])
        print(f"  {phases[-1]}: {len(names)} results checked, worst {worst}: error {errors[worst]:.2e}, "
              f"eager's {limits[worst]:.2e}")  # fmt: skip
        if wrong:
            raise CodaError.of(f"{model.name}, {phases[-1]}: over the gate: " + ", ".join(
                f"{n} {errors[n]:.2e} (eager {limits[n]:.2e})" for n in wrong))  # fmt: skip


def reference(model: Model, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients by torch's autograd, in the precision of the operands."""
    wanted = {name: x[name].detach().requires_grad_() for name in layer.DIFFERENTIABLE}
    results = layer.forward({**x, **wanted}, model, layer.TORCH)
    gradients = torch.autograd.grad(results, list(wanted.values()), [x[f"d_{n}"] for n in layer.RESULTS])
    found = dict(zip(layer.RESULTS, (r.detach() for r in results), strict=True))
    return found | {f"d_{n}": g for n, g in zip(wanted, gradients, strict=True)}


def merged(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of parts of a weight as the gradient of the whole. The gradients of results are operands, not found."""
    found = {n: t for n, t in values.items() if n not in {f"d_{r}" for r in layer.RESULTS}}
    for whole, parts in {"d_w_gate_up": ("d_w_gate", "d_w_up"), "d_w_qkv": ("d_w_q", "d_w_k", "d_w_v")}.items():
        if all(p in found for p in parts):
            found[whole] = torch.cat([found[p] for p in parts])
    return found


def launches(model: Model, rows: int, phase: str, call: Call) -> None:
    """The kernels of one call: how many of each kind are predicted, what bytes they move, and what the profiler saw."""
    programs = ours.block(model)
    used = ("inference",) if phase == "forward" else ("forward", "backward")
    sides = [Side.of(programs[p], ours.known(programs[p], model, rows)) for p in used]
    predicted = sum((side.count() for side in sides), Counter[str]())
    moved = sum(side.moved() or 0 for side in sides)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    print(f"  {phase}: predicted {predicted.total()} launches ({', '.join(f'{n} {k}' for k, n in predicted.items())}), "
          f"{moved / 1e9:.2f} GB; the profiler saw {len(kernels)}")  # fmt: skip
    for event in kernels:
        print(f"    {event.name[:60]:60s} {event.time_range.elapsed_us() / 1e3:8.3f} ms")


def host_time(call: Call) -> float:
    """Microseconds until a call returns, the device being busy with others; the median."""
    torch.cuda.synchronize()
    laps = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter()
        call()
        laps.append(1e6 * (time.perf_counter() - start))
        if len(laps) % 5 == 0:
            torch.cuda.synchronize()  # the queue of launches is finite
    return statistics.median(laps)


if __name__ == "__main__":
    sys.exit(main())
