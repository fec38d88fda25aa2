"""coda explain: show the kernels that a program becomes, and what it costs.

Shows the plan of each (what the epilogue reads, computes and stores, and where), the bytes moved when fused and when
not, the operations, and the time below which a GPU cannot run it. Without --dims the costs are formulas.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from coda import cost as costs
from coda.cli import planview, rowview
from coda.cli.common import add_json, add_request, human_bytes, print_json, table
from coda.cli.request import Request, from_args
from coda.cost import Cost, Gpu
from coda.errors import CodaError
from coda.runtime.binding import bind
from coda.target import TILES, Tile, choose_tile, parse_tile
from coda.target.blocks import lower_program
from coda.target.rowplan import RowPlan
from coda.target.schedule import Kernel

WAYS = {
    "fused": "one kernel",
    "two_kernels": "product, then one kernel",
    "one_by_one": "one kernel for each operation",
}


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda) or a config (.toml)")
    parser.add_argument("--gpu", choices=costs.GPUS, default="h200", help="whose floor time (default: %(default)s)")
    parser.add_argument("--tile", metavar="128x192", help="the tile of the kernel (default: by size)")
    parser.add_argument(
        "--model", action="store_true",
        help="FILE is module:factory, a function that returns a model and its inputs: what torch.compile would fuse",
    )  # fmt: skip
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.model:
        return _run_model(args)
    request = from_args(args)
    program = request.program
    sizes = bind(program, {}, request.dims)
    formulas = costs.cost(program)
    report = Report(request, formulas, formulas.at(sizes), costs.GPUS[args.gpu])
    try:
        schedule = lower_program(program)
        report.kernels = [(step, _tile(step, request, sizes)) for step in schedule.steps]
        report.edges = {t.name: f"{t.dtype}[{', '.join(t.axes)}]" for t in schedule.temporaries}
        if report.numbers.is_number:
            report.refusal = planview.refusal(schedule, sizes, report.kernels[0][1] or TILES[0])
    except CodaError as error:  # a block program, say: what it costs can be told all the same
        report.reason = error
    if args.json:
        print_json(report.document())
    else:
        print(report.text())
    return 0


def _run_model(args: argparse.Namespace) -> int:
    from coda.pytorch.explain import explain_named

    report = explain_named(args.file)
    if args.json:
        print_json(report.document())
    else:
        print(report)
    return 0


def _tile(step: Kernel, request: Request, sizes: Mapping[str, int]) -> Tile | None:
    if isinstance(step, RowPlan):
        return None
    return parse_tile(request.tile) if request.tile else choose_tile(step, sizes)


def _document(step: Kernel, tile: Tile | None) -> dict:
    if isinstance(step, RowPlan):
        return rowview.document(step)
    return planview.document(step, tile or TILES[0])


def _text(step: Kernel, tile: Tile | None) -> list[str]:
    return rowview.text(step) if isinstance(step, RowPlan) else planview.text(step, tile or TILES[0])


@dataclass
class Report:
    """What is known of a program: its kernel, or why it has none, and its costs as formulas and as numbers."""

    request: Request
    formulas: Cost
    numbers: Cost
    gpu: Gpu
    kernels: list[tuple[Kernel, Tile | None]] = field(default_factory=list)  # in the order they run; tiles of GEMMs
    edges: dict[str, str] = field(default_factory=dict)  # tensors between kernels, with their types
    reason: CodaError | None = None  # why there is no kernel
    refusal: str | None = None  # why the kernels would not take these sizes

    def document(self) -> dict:
        """The report as JSON. Numbers are None where a size is not known."""
        known = self.numbers.is_number
        return {
            "program": self.request.program.name,
            "dims": self.request.dims,
            "kernel": _document(*self.kernels[0]) if len(self.kernels) == 1 else None,
            "kernels": [_document(*kernel) for kernel in self.kernels],
            "launches": sum(1 + len(step.finishings) for step, _ in self.kernels),
            "between": self.edges,
            "refusal": self.refusal,
            "reason": self.reason.diagnostics[0].message if self.reason else None,
            "formulas": {f.name: str(getattr(self.formulas, f.name)) for f in fields(Cost)},
            "values": {f.name: int(getattr(self.numbers, f.name)) if known else None for f in fields(Cost)},
            "gpu": self.gpu.name,
            "floor_ms": {way: 1e3 * self.numbers.seconds(way, self.gpu) if known else None for way in WAYS},
        }

    def text(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.request.dims.items())
        lines = [self.request.program.name + (f" at {sizes}" if sizes else "")]
        if self.kernels:
            for step, tile in self.kernels:
                lines += [f"  {step.name}"] if len(self.kernels) > 1 else []
                lines += _text(step, tile)
            lines += [f"  refused at these sizes: {self.refusal}"] if self.refusal else []
        elif self.reason is not None:
            lines += ["not lowered:", str(self.reason)]
        return "\n".join([*lines, "", *(self._costs() if self.numbers.is_number else self._formulas())])

    def _costs(self) -> list[str]:
        rows = [("", "bytes moved", f"floor on {self.gpu.name}")]
        for way, title in WAYS.items():
            moved, seconds = float(getattr(self.numbers, way)), self.numbers.seconds(way, self.gpu)
            rows.append((title, human_bytes(moved), f"{1e3 * seconds:.3f} ms"))
        rates = f"{self.gpu.bf16_flops / 1e12:.0f} TFLOP/s and {self.gpu.bytes_per_second / 1e12:.2f} TB/s"
        return [table(rows), f"  {float(self.numbers.flops) / 1e9:.1f} GFLOP; floors at {rates}, as measured"]

    def _formulas(self) -> list[str]:
        rows = [("operations", str(self.formulas.flops))]
        rows += [(f"bytes, {title}", str(getattr(self.formulas, way))) for way, title in WAYS.items()]
        sizes = ",".join(f"{axis.name}=4096" for axis in self.request.program.free_axes)
        return [table(rows), f"  give all sizes for numbers, as in --dims {sizes}"]
