"""Measure each product of a Llama layer, with all that is computed around it, beside cuBLAS, eager PyTorch,
torch.compile and the peers, in one run.

    python -m benchmarks.build .bench --what items --best 2 --jobs 16
    python -m benchmarks.items --peers /tmp/peers         # see benchmarks/peers/README.md; without --peers: no peers

Implementations that cannot share a process run in several, which take turns on the GPU: in each round every process
times its candidates and cuBLAS once, and a ratio is that of a candidate to cuBLAS of the same process and round. Where
an implementation has several tiles, the better half of them goes on after every few rounds, until one is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import ITEMS, MODELS
from benchmarks.records import RESULTS, Row, write
from benchmarks.run import ROOT, device_name, versions
from coda.runtime.timing import MIN_ROUNDS, summarize


@dataclass
class Process:
    """A worker (worker.py) at the other end of two pipes."""

    model: str
    name: str
    popen: subprocess.Popen

    @classmethod
    def start(cls, model: str, name: str, modules: Sequence[str], path: Sequence[Path], logs: Path) -> Process:
        """``path`` is where it finds modules first; -P keeps the working directory out of it."""
        inherited = os.environ.get("PYTHONPATH", "")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [inherited])])}
        command = [sys.executable, "-P", "-m", "benchmarks.worker", *modules]
        log = (logs / f"{model}.{name}.txt").open("w")
        pipes = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                 text=True)  # fmt: skip
        return cls(model, name, pipes)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a request. Raises RuntimeError where the process died or failed."""
        assert self.popen.stdin is not None and self.popen.stdout is not None
        try:
            self.popen.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.popen.stdin.flush()
            line = self.popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"it ended with status {self.popen.wait()}"}
        if "error" in answer:
            raise RuntimeError(f"{self.model}, {self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(30)


def crews(peers: Path | None) -> dict[str, tuple[list[str], list[Path]]]:
    """What runs together: the modules of a process, and where Python looks for modules first."""
    found = {"ours": (["benchmarks.ours", "benchmarks.peers.torch_math"], [ROOT])}
    if peers is not None:
        shared = [peers / "site", peers / "site" / "nvidia_cutlass_dsl" / "dsl_packages", peers / "stubs"]
        found["quack"] = (["benchmarks.peers.quack", "benchmarks.peers.liger"], [ROOT, *shared])
        found["coda-kernels"] = (["benchmarks.peers.coda_kernels"], [peers / "coda_kernels", *shared, ROOT])
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--artifacts", type=Path, default=ROOT / ".bench", help="folder of MODEL/KERNEL.TILE.so files")
    parser.add_argument("--peers", type=Path, help="where benchmarks/peers/install.sh put them")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--items", nargs="+", choices=list(ITEMS), default=list(ITEMS))
    parser.add_argument("--rows", type=int, default=8192, help="rows M of the activations")
    parser.add_argument("--rounds", type=int, default=50, help="at most this many rounds an item")
    parser.add_argument("--budget", type=float, default=120, help="seconds for the rounds of all items")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--logs", type=Path, default=ROOT / ".bench" / "logs", help="what the processes say")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.items measures on a GPU, and there is none here", file=sys.stderr)
        return 2
    args.logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    crew = [Process.start(model, name, modules, path, args.logs) for model in args.models
            for name, (modules, path) in crews(args.peers).items()]  # fmt: skip
    with ThreadPoolExecutor(len(crew)) as pool:  # all at once: it is mostly compilation
        offers = list(pool.map(lambda process: prepare(process, args), crew))
    print(f"M={args.rows}: prepared in {time.monotonic() - start:.0f} s", flush=True)
    rows: list[Row] = []
    pairs = [(model, item) for model in args.models for item in args.items]
    end = time.monotonic() + args.budget
    for index, (model, item) in enumerate(pairs):
        ready = [(p, offer[item]) for p, offer in zip(crew, offers, strict=True) if p.model == model and item in offer]
        if ready:
            share = max(0.0, end - time.monotonic()) / (len(pairs) - index)
            rows += take_turns(item, model, ready, args, share)
    for process in crew:
        process.close()
    command = shlex.join(["python", "-m", "benchmarks.items", *(sys.argv[1:] if argv is None else argv)])
    print(f"wrote {write(rows, device_name(), versions(), command, args.out)}")
    return 0


def prepare(process: Process, args: argparse.Namespace) -> dict[str, list]:
    """What a process has ready for each item. One that dies offers nothing, and says so."""
    offers = {}
    for item in args.items:
        request = {"model": process.model, "item": item, "rows": args.rows, "folder": str(args.artifacts)}
        try:
            answer = process.ask("prepare", **request)
        except RuntimeError as error:
            print(f"  {item}: {error}", flush=True)
            if process.popen.poll() is not None:
                return {}
            continue
        offers[item] = answer["ready"]
        for impl, tile, reason in answer["left_out"]:
            print(f"  {process.model} {item}: {impl} {tile or ''} is left out: {reason}", flush=True)
    return offers


def take_turns(
    item: str, model: str, ready: Sequence[tuple[Process, list]], args: argparse.Namespace, seconds: float
) -> list[Row]:
    """Rounds of all processes, in a new order each time: the first to warm up, then some of every tile, then some of
    the better half of each implementation's, and so on."""
    chosen = {process.name: list(range(len(offered))) for process, offered in ready}
    times: dict[str, list[dict[int, float]]] = {process.name: [] for process, _ in ready}
    order, end, done = list(ready), time.monotonic() + seconds, 0
    shuffle = random.Random(0).shuffle
    while done < args.rounds + 1 and (done < MIN_ROUNDS + 1 or time.monotonic() < end):
        shuffle(order)
        for process, _ in order:
            only = chosen[process.name]
            answer = process.ask("round", model=model, item=item, only=only)
            times[process.name].append(dict(zip(only, answer["times"], strict=True)))
        done += 1
        if done > 1 and (done - 1) % MIN_ROUNDS == 0:
            chosen = {p.name: better_half(offered, chosen[p.name], times[p.name][1:]) for p, offered in ready}
    m, n, k = ITEMS[item].product(MODELS[model], args.rows)
    rows = []
    for process, offered in ready:
        for index, (impl, tile, error) in enumerate(offered):
            laps = [lap for lap in times[process.name][1:] if index in lap]
            measured = summarize([lap[index] for lap in laps], [lap[0] for lap in laps])
            rows.append(Row(item, ITEMS[item].phase, model, m, n, k, "bf16", impl, tile, measured.median_ms,
                            measured.ratio, measured.ratio_quartiles, measured.rounds, error or None))  # fmt: skip
    show(item, rows)
    return rows


def better_half(offered: Sequence, chosen: Sequence[int], laps: Sequence[dict[int, float]]) -> list[int]:
    """The candidates to go on with, of those chosen so far: of each implementation the faster half."""
    found: list[int] = []
    for impl in dict.fromkeys(offered[index][0] for index in chosen):
        of_impl = [index for index in chosen if offered[index][0] == impl]
        of_impl.sort(key=lambda i: statistics.median(lap[i] / lap[0] for lap in laps if i in lap))
        found += of_impl[: (len(of_impl) + 1) // 2]
    return sorted(found)


def show(item: str, rows: list[Row]) -> None:
    """The best of each implementation; cuBLAS as each process saw it."""
    bare = ", ".join(f"{r.median_ms:.3f}" for r in rows if r.impl == "cublas")
    shape = f"{rows[0].M}x{rows[0].N}x{rows[0].K}"
    print(f"  {rows[0].model} {item} {shape}, {rows[0].rounds} rounds, cuBLAS {bare} ms:", flush=True)
    for impl in dict.fromkeys(r.impl for r in rows if r.impl != "cublas"):
        best = max((r for r in rows if r.impl == impl), key=lambda r: (r.rounds, -r.ratio))
        quartiles = "{:.3f} to {:.3f}".format(*best.ratio_quartiles)
        print(f"    {impl:14s} {best.tile or '':12s} {best.median_ms:8.3f} ms  {best.ratio:.3f}  ({quartiles})")


if __name__ == "__main__":
    sys.exit(main())
