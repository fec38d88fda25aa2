"""Measure a linear layer with cross entropy, forward and with its backward, beside its bare products, eager PyTorch,
torch.compile and Liger, in one run: time and peak memory.

    python -m benchmarks.loss                       # Llama-3-8B's head at 8192 tokens; builds its kernels first
    python -m benchmarks.loss --build-only          # only fills the cache, without a GPU
    python -m benchmarks.loss --shapes 8192x50257x768 --peers /tmp/peers

Ratios are to the bare cuBLAS products: one forward, three with the backward, on operands of the same dtype. The peak of
memory is what a call needs beyond its operands; results and gradients count. Each candidate is first checked against
float64, at full size: nothing that is wrong by more than twice the error of eager torch is timed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.memory import peak_bytes
from benchmarks.records import RESULTS, Row, write
from benchmarks.run import device_name, shape, versions
from coda import build
from coda.ir import Program
from coda.nn.functional import linear_cross_entropy
from coda.nn.loss import program_text
from coda.pytorch.block import Options, block
from coda.runtime.timing import CudaTimer, Measurement, interleave

SHAPES = ((8192, 128256, 4096),)  # tokens, vocabulary, width: Llama-3-8B
GATE = 2.0
MODES = ("fast", "low")
FORWARD, BOTH = "forward", "forward+backward"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Operands = tuple[Tensor, Tensor, Tensor]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=shape, default=list(SHAPES), metavar="MxVxD")
    parser.add_argument("--peers", type=Path, help="where benchmarks/peers/install.sh put them: for Liger")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--build-only", action="store_true", help="compile coda's kernels into the cache, and stop")
    parser.add_argument("--rounds", type=int, default=30, help="at most this many rounds a shape and phase")
    parser.add_argument("--budget", type=float, default=40, help="seconds for all rounds")
    parser.add_argument("--out", type=Path, default=RESULTS / "loss", help="folder of the JSON file")
    args = parser.parse_args(argv)
    if not args.build_only and not torch.cuda.is_available():
        print("benchmarks.loss measures on a GPU, and there is none here", file=sys.stderr)
        return 2
    start = time.monotonic()
    for m, v, d in args.shapes:
        build_all({"M": m, "V": v, "K": d})
    print(f"kernels are built after {time.monotonic() - start:.0f} s")
    if args.build_only:
        return 0
    if args.peers is not None:
        sys.path.append(str(args.peers / "site"))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    rows: list[Row] = []
    for m, v, d in args.shapes:
        rows += measure(m, v, d, args)
        torch.cuda.empty_cache()
    command = shlex.join(["python", "-m", "benchmarks.loss", *(sys.argv[1:] if argv is None else argv)])
    print(f"wrote {write(rows, device_name(), versions(), command, args.out)}")
    return 0


# -- coda's kernels ---------------------------------------------------------------------------------------------------


def build_all(sizes: Mapping[str, int]) -> None:
    """Compile everything that will run, all at once, into the cache from which the calls take it."""
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(build.artifact, p, sizes, chunk=chunk) for p, chunk in programs()]
        for job in jobs:
            job.result()


def programs() -> Iterator[tuple[Program, str | None]]:
    """The programs behind ``linear_cross_entropy``, each with the axis in whose chunks it runs."""
    dtypes = (("x", torch.bfloat16), ("w", torch.bfloat16), ("target", torch.int64))
    text = program_text(dtypes, -100, "mean", 0.0, 0.0, None)
    yield block(text, Options(sizes=("M", "K", "V")).text()).forward, None
    for memory in MODES:
        it = block(text, Options(sizes=("M", "K", "V"), wrt=("x", "w"), memory=memory).text())
        assert it.gradients is not None
        yield it.forward, None
        yield it.backward(("x", "w"))[0], it.gradients.chunk


# -- candidates -------------------------------------------------------------------------------------------------------


def eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    logits = x @ w.T
    return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), target)


def candidates(args: argparse.Namespace) -> Iterator[tuple[str, Loss]]:
    for memory in MODES:
        yield f"coda-{memory}", lambda x, w, target, memory=memory: linear_cross_entropy(x, w, target, memory=memory)
    yield "eager", eager
    if not args.no_compile:
        torch._dynamo.reset()
        yield "torch.compile", torch.compile(eager, dynamic=False)
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return
    liger = LigerFusedLinearCrossEntropyLoss()
    yield "liger", lambda x, w, target: liger(w, x, target)


def operands(m: int, v: int, d: int, seed: int) -> Operands:
    """Random rows, weight and labels; no zeros, which would run cooler and faster."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, d, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(v, d, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(d**-0.5)
    return x, w, torch.randint(v, (m,), generator=generator, device="cuda")


def call_of(loss: Loss, phase: str, at: Operands) -> Callable[[], object]:
    x, w, target = at
    if phase == FORWARD:

        def forward() -> Tensor:
            with torch.no_grad():
                return loss(x, w, target)

        return forward
    leaves = (x.detach().requires_grad_(), w.detach().requires_grad_())
    return lambda: torch.autograd.grad(loss(*leaves, target), leaves)


def bare(phase: str, at: Operands) -> Callable[[], object]:
    """The products alone: logits, and both gradients from as many random numbers."""
    x, w, _ = at
    if phase == FORWARD:
        return lambda: x @ w.T
    dz = torch.randn(x.shape[0], w.shape[0], device="cuda", dtype=x.dtype)
    return lambda: (x @ w.T, dz @ w, dz.T @ x)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(m: int, v: int, d: int, args: argparse.Namespace) -> list[Row]:
    at = operands(m, v, d, 0)
    errors, losses = checked(at, args)
    rows = []
    print(f"M={m} V={v} D={d}")
    for phase in (FORWARD, BOTH):
        calls = {impl: call_of(loss, phase, at) for impl, loss in losses.items()}
        for call in calls.values():
            call()  # whatever is made once
        peaks = {impl: peak_bytes(call) for impl, call in calls.items()}
        calls["cublas"] = bare(phase, at)
        timer = CudaTimer()
        measured = interleave(calls, "cublas", timer, args.rounds, args.budget / 2 / len(args.shapes))
        for impl, result in sorted(measured.items(), key=lambda item: item[1].ratio):
            peak = peaks.get(impl)
            size = "" if peak is None else f"peak {peak / 2**30:6.2f} GiB"
            print(f"  {phase:17s} {impl:14s} {result.median_ms:8.3f} ms  ratio {result.ratio:.3f}  {size}", flush=True)
            rows.append(row(phase, (m, v, d), impl, result, errors.get(impl), peak))
    return rows


def row(
    phase: str, size: tuple[int, int, int], impl: str, result: Measurement, error: float | None, peak: int | None
) -> Row:
    return Row(
        "linear_cross_entropy", phase, None, *size, "bf16", impl, None, result.median_ms, result.ratio,
        result.ratio_quartiles, result.rounds, error, peak_bytes=peak,
    )  # fmt: skip


def checked(at: Operands, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, Loss]]:
    """The candidates whose loss and gradients are right, and their largest error."""
    want = results(eager, (at[0].double(), at[1].double(), at[2]))
    limits = [GATE * error for error in relative(results(eager, at), want)]
    found, errors = {}, {}
    for impl, loss in candidates(args):
        error = relative(results(loss, at), want)
        if all(e <= max(limit, 2.0**-8) for e, limit in zip(error, limits, strict=True)):  # NaN fails, too
            found[impl], errors[impl] = loss, max(error)
        else:
            print(f"  {impl}: errors {error} are over the gate {limits}; not timed")
    return errors, found


def results(loss: Loss, at: Operands) -> tuple[Tensor, ...]:
    """The loss and its gradients for rows and weight."""
    leaves = (at[0].detach().requires_grad_(), at[1].detach().requires_grad_())
    value = loss(*leaves, at[2])
    return value.detach(), *torch.autograd.grad(value, leaves)


def relative(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> list[float]:
    """``|got - want| / |want|`` of each."""
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
