"""How many products of each model are fused: the table of docs/torch_compile.md.

    python -m benchmarks.coverage                   # all models, on the CPU; some minutes
    python -m benchmarks.coverage llama gemma2

The models are those of the tests, unmodified, two layers with heads of 64 columns, in bf16. A product counts as fused
where it is in a program whose kernels are all lowered for sm_90a; nothing is built. Products of experts are grouped,
and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.run import ROOT
from benchmarks.table import splice
from coda.pytorch import backend
from coda.pytorch.report import Report, listening
from tests.pytorch import models
from tests.pytorch.handwritten import WIDE

BEGIN = "<!-- coverage: begin (written by benchmarks.coverage) -->"
END = "<!-- coverage: end -->"
PAGE = ROOT / "docs" / "torch_compile.md"
OPTIONS = {"inductor": False, "kernels": True}


@dataclass(frozen=True)
class Coverage:
    """``reasons``: why products are not fused."""

    fused: int
    total: int
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Coverage:
        lines = [line for report in reports for line in report.lines]
        reasons = dict.fromkeys(line.reason for line in lines if line.reason)
        return cls(sum(not line.reason for line in lines), len(lines), tuple(reasons))


def coverage(name: str, training: bool) -> Coverage:
    """What becomes of the products of a model."""
    torch._dynamo.reset()
    with contextlib.redirect_stderr(io.StringIO()):
        model, given = models.tiny(name, torch.bfloat16, WIDE), models.inputs(name, torch.bfloat16)
    with listening() as reports, torch.set_grad_enabled(training):
        torch.compile(model, backend=backend.coda, options=OPTIONS)(**given)
    return Coverage.of(reports)


def table(found: dict[str, tuple[Coverage, Coverage]]) -> str:
    """Markdown."""
    rows = ["| model | inference | training | not fused |", "|---|---|---|---|"]
    for name, (inference, training) in found.items():
        why = "; ".join(dict.fromkeys((*inference.reasons, *training.reasons)))
        rows.append(f"| {name} | {inference.fused} / {inference.total} | {training.fused} / {training.total} | {why} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "models", nargs="*", default=list(models.zoo()), help="which; by default all, and write the page"
    )
    args = parser.parse_args(argv)
    found = {}
    for name in args.models:
        found[name] = coverage(name, False), coverage(name, True)
        print(f"{name}: {found[name][0]}, {found[name][1]}", flush=True)
    content = table(found)
    print(content)
    if args.models == list(models.zoo()):
        PAGE.write_text(splice(PAGE.read_text(), content, BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main())
