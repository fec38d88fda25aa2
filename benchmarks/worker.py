"""A measuring process: it prepares candidates and times rounds of them when it is told to.

    python -P -m benchmarks.worker benchmarks.peers.quack benchmarks.peers.liger

Each module has ``offer(item, model)``, which yields candidates (candidates.py), and may have ``compile_ahead(calls)``;
or it has ``offer_ready(item, model, rows, folder)``, where it prepares and checks its own. Requests come as lines of
JSON on stdin, answers go to stdout: see ``serve``. All processes share one GPU; only the one that was asked uses it,
and each times cuBLAS in every round, so that ratios are taken within a process and a round.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks import eager
from benchmarks.candidates import LeftOut, NotTimed, Ready, ready, sets, timing
from benchmarks.models import ITEMS, MODELS


class Worker:
    """The prepared calls of one process, by model and item."""

    def __init__(self, modules: list[str]):
        self.modules = [importlib.import_module(name) for name in modules]
        self.ready: dict[tuple[str, str], list[Ready]] = {}
        self.timer = timing.CudaTimer()
        self.random = random.Random(0)

    def prepare(self, model: str, item: str, rows: int, folder: str) -> dict[str, Any]:
        """Check and warm all that the modules offer for an item: what is ready, and why the rest is not."""
        chosen, size = ITEMS[item], MODELS[model]
        operands = [eager.operands(chosen, size, rows, seed, "cuda") for seed in range(sets(chosen, size, rows))]
        products = [(x["a"], x["b"]) for x in operands]
        found: list[Ready | LeftOut] = [Ready("cublas", None, timing.rotating(eager.bare(chosen), products), 0.0)]
        for module in self.modules:
            try:
                if hasattr(module, "offer_ready"):
                    found += module.offer_ready(chosen, size, rows, Path(folder))
                    continue
                offered = list(module.offer(chosen, size))
                if hasattr(module, "compile_ahead"):
                    module.compile_ahead(partial(c.run, c.prepare(dict(operands[0]))) for c in offered)
            except Exception as error:
                found.append(LeftOut(module.__name__, None, _one_line(error)))
                continue
            for candidate in offered:
                try:
                    found.append(ready(candidate, chosen, size, rows, operands))
                except Exception as error:  # of any kind: a peer that fails is left out, and said so
                    found.append(LeftOut(candidate.impl, candidate.tile, _one_line(error)))
        kept = [x for x in found if isinstance(x, Ready)]
        for x in kept:
            x.call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.ready[model, item] = kept
        left_out = [[x.impl, x.tile, x.reason] for x in found if isinstance(x, LeftOut)]
        return {"ready": [[x.impl, x.tile, x.error] for x in kept], "left_out": left_out}

    def round(self, model: str, item: str, only: list[int]) -> dict[str, Any]:
        """The times of some of what is ready, in milliseconds; of cuBLAS, which is number 0, a mean of several."""
        ready = self.ready[model, item]
        times = timing.one_round({i: ready[i].call for i in only}, 0, self.timer, self.random)
        return {"times": [times[i] for i in only]}


def _one_line(error: Exception) -> str:
    text = str(error) if isinstance(error, NotTimed) else "".join(traceback.format_exception_only(error))
    return " ".join(text.split())[:400]


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """A request is ``{"do": METHOD, ...its arguments}``, an answer what it returns or ``{"error": why}``."""
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": _one_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    serve(Worker(sys.argv[1:]), sys.stdin, pipe)
