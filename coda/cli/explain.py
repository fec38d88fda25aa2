"""coda explain: show the kernels that a program becomes, and what they cost.

Shows the plan of each (what the epilogue reads, computes and stores, and where), the bytes it moves, its operations,
and the time below which a GPU cannot run it; which operations run outside the kernels of products, and why; the
rewrites that were made. Without --dims the costs are formulas. --backward explains the derived backward, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coda import cost as costs
from coda.cli.common import add_json, add_request, print_json, write_text
from coda.cli.measured import measure
from coda.cli.progress import progress
from coda.cli.proofs import proofs
from coda.cli.report import Report, Side
from coda.cli.request import Request, from_args
from coda.cli.svg import svg
from coda.frontend import load
from coda.passes import derive
from coda.runtime.binding import bind


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda) or a config (.toml)")
    parser.add_argument("--gpu", choices=costs.GPUS, default="h200", help="whose floor time (default: %(default)s)")
    parser.add_argument("--tile", metavar="128x192", help="the tile of the kernels (default: by size)")
    parser.add_argument("--backward", action="store_true", help="explain the derived backward, too")
    parser.add_argument("--wrt", metavar="NAMES", help="parameters that want gradients (default: all that can)")
    parser.add_argument("--prove", action="store_true", help="prove every rewrite; exit code 1 where a proof fails")
    parser.add_argument("--measure", action="store_true", help="time each kernel on this GPU, beside its floor")
    parser.add_argument("--svg", type=Path, metavar="OUT.svg", help="draw it: kernels as boxes, tensors as arrows")
    parser.add_argument(
        "--model", action="store_true",
        help="FILE is module:factory, a function that returns a model and its inputs: what torch.compile would fuse",
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.wrt and not args.backward and not args.file.endswith(".toml"):
        args.usage_error("--wrt is about a backward: add --backward")
    if args.model and (args.backward or args.prove or args.measure):
        args.usage_error("--backward, --prove and --measure are about a program, not a model")
    if args.model:
        _show_model(args)
        return 0
    request, wrt = from_args(args), args.wrt.split(",") if args.wrt else None
    backward, wrt = args.backward or request.backward, wrt or request.wrt
    report = explain(request, args.gpu, backward, wrt)
    if args.measure:
        with progress(f"measuring {request.program.name}"):
            times: dict[str, float] = {}
            for side in report.sides:
                times |= measure(side.lowered, side.sizes, side.tiles)
        report = replace(report, measured=times)
    found = tuple(proofs(request.program, backward, wrt, report.lowered)) if args.prove else ()
    if args.svg is not None:
        write_text(args.svg, svg([report]))
    if args.json:
        print_json(report.document() | ({"proofs": [p.document() for p in found]} if args.prove else {}))
    else:
        print("\n".join([report.text(), *(["", "proofs"] if args.prove else []), *(f"  {p}" for p in found)]))
    return 0 if all(p.proof for p in found) else 1


def explain(request: Request, gpu: str = "h200", backward: bool = False, wrt: Sequence[str] | None = None) -> Report:
    """What there is to say of a program, and of its backward where it is wanted."""
    program = request.program
    sizes = bind(program, {}, request.dims)
    if not backward:
        side = Side.of(program, sizes, request.tile)
        return Report(program.name, request.dims, costs.GPUS[gpu], (side,), side.notes)
    derived, notes = derive(program, wrt)
    pair = ((derived.forward, None), (derived.backward, derived.chunk))
    sides = tuple(Side.of(p, sizes, request.tile, chunk) for p, chunk in pair)
    return Report(program.name, request.dims, costs.GPUS[gpu], sides, (*notes, *(n for s in sides for n in s.notes)))


def explain_model(name: str, gpu: str) -> tuple[Any, list[Report]]:
    """The report on the products of a model, and one on each program that they are in."""
    from coda.pytorch.model import explain_named

    model = explain_named(name)
    programs = (load(text).programs.values() for text in model.programs)
    requests = (Request(program) for (program,) in programs)
    return model, [explain(request, gpu) for request in requests]


def _show_model(args: argparse.Namespace) -> None:
    model, reports = explain_model(args.file, args.gpu)
    if args.svg is not None:
        write_text(args.svg, svg(reports))
    if args.json:
        documents = [report.document() for report in reports]
        kernels = [kernel for document in documents for kernel in document["kernels"]]
        print_json({**model.document(), "kernels": kernels, "regions": documents})
    else:
        print("\n\n".join(map(str, [model, *(report.text() for report in reports)])))
