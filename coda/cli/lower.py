"""coda lower: build the artifact of a program, OUT.so and OUT.h.

FILE is a program, or a .toml config, which options override:

    program = "residual_stats.coda"   # relative to the config
    name = "residual_stats"           # when the file has several programs

    [dims]                            # guide the choice of the tile; the artifact serves other sizes, too
    M = 8192

    [consts]                          # values of const parameters
    [dtypes]                          # dtypes of parameters that differ from the source, as in x = "f16"

    [target]
    arch = "sm_90a"
    tile = "128x192"

A program with opaque calls becomes one artifact for each segment between them, OUT_1.so, OUT_2.so ...; the report says
what is called between, with which tensors. --backward also builds the derived backward, OUT_backward.so; the forward
then returns what it reads, and `coda derive` prints both.

Building needs nvcc but no GPU; `coda doctor` says what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from coda import build
from coda.cli import planview
from coda.cli.common import add_json, add_request, print_json
from coda.cli.progress import progress
from coda.cli.request import ARCHES, Request, from_args
from coda.errors import CodaError
from coda.ir import Program
from coda.passes import derive, fuse
from coda.passes.differentiate import MEMORY
from coda.passes.segments import has_calls, segments
from coda.runtime.binding import bind
from coda.target import TILES, Tile
from coda.target.schedule import Assembly
from coda.tuning.use import declined_here, tiles_here


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda) or a config (.toml)")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.so", help="the library; OUT.h is put beside it")
    parser.add_argument("--backward", action="store_true", help="build the derived backward, too: OUT_backward.so")
    parser.add_argument("--wrt", metavar="NAMES", help="parameters that want gradients (default: all that can)")
    parser.add_argument(
        "--memory", choices=MEMORY, default="fast", help="low: recompute products, in chunks; keep less"
    )
    parser.add_argument("--arch", choices=ARCHES, help="the target (default: sm_90a)")
    parser.add_argument("--tile", metavar="128x192", help="TileM x TileN; several with commas (default: by --dims)")
    parser.add_argument("--no-build", action="store_true", help="generate the sources only; needs no nvcc")
    parser.add_argument("--keep-sources", type=Path, metavar="DIR", help="put what is compiled, and the log, there")
    add_json(parser)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.output is None and not args.no_build:
        args.usage_error("say where the library goes, -o OUT.so, or generate sources only, --no-build")
    if args.output is not None and args.output.suffix != ".so":
        args.usage_error(f"-o {args.output}: the name of the library ends in .so")
    request = from_args(args)
    if (args.wrt or args.memory != "fast") and not args.backward:
        args.usage_error("--wrt and --memory are about a backward: add --backward")
    if args.backward:
        reports = _with_backward(args, request)
    elif has_calls(request.program):
        reports = _segments(args, request)
    else:
        reports = [_lower(args, request, args.output)]
    if args.json:
        several = "artifacts" if args.backward else "segments"
        print_json(reports[0] if len(reports) == 1 else {"program": request.program.name, several: reports})
    else:
        print("\n\n".join(map(_text, reports)))
    return 0


def _with_backward(args: argparse.Namespace, request: Request) -> list[dict[str, object]]:
    """An artifact of the forward, which returns what the backward needs as well, and one of the derived backward."""
    derived, _ = derive(request.program, args.wrt.split(",") if args.wrt else None, memory=args.memory)
    reports = []
    for part, suffix, chunk in ((derived.forward, "", None), (derived.backward, "_backward", derived.chunk)):
        output = args.output and args.output.with_name(f"{args.output.stem}{suffix}.so")
        known = {axis.name for axis in part.axes} | {s.name for axis in part.axes for s in axis.size.free_symbols}
        dims = {name: size for name, size in request.dims.items() if name in known}
        reports.append(_lower(args, replace(request, program=part, dims=dims), output, chunk))
        if chunk is not None:
            reports[-1]["chunks"] = chunk
    return reports


def _text(report: Mapping[str, object]) -> str:
    return "\n".join(f"{key}: {', '.join(v) if isinstance(v, list) else v}" for key, v in report.items())


def _segments(args: argparse.Namespace, request: Request) -> list[dict[str, object]]:
    """An artifact for each segment of a program with opaque calls, and the calls that the caller makes between them."""
    reports: list[dict[str, object]] = []
    for part in segments(fuse(request.program).forward):
        if not isinstance(part, Program):
            callee = next(n.attr("callee") for n in part.program.nodes() if n.op == "call")
            reads, writes = ([x.name for x in xs] for xs in (part.program.params, part.program.outputs))
            reports.append({"call": callee.name, "reads": reads, "writes": writes})
            continue
        known = {s.name for axis in part.axes for s in axis.size.free_symbols} | {axis.name for axis in part.axes}
        dims = {name: size for name, size in request.dims.items() if name in known}
        number = part.name.removeprefix(request.program.name)
        output = args.output and args.output.with_name(f"{args.output.stem}{number}.so")
        reports.append(_lower(args, replace(request, program=part, dims=dims), output))
    return reports


def _lower(
    args: argparse.Namespace, request: Request, output: Path | None, chunk: str | None = None
) -> dict[str, object]:
    """Build one artifact, or generate its sources."""
    assembly, sizes, chosen = _assembly(request, chunk)
    tiles = list(dict.fromkeys(v.tile.name for v in assembly.variants))
    report: dict[str, object] = {"program": assembly.name, "arch": request.arch, "tiles": tiles}
    report["kernels"] = [step.name for step in assembly.schedule.steps]
    if args.no_build or output is None:
        return report | _generate(assembly, args.keep_sources, request.arch)
    with progress(f"building {output}") as say:
        given = tiles if request.tile else None  # by default the best tiles that do not spill
        build.build(assembly.schedule, given, output, args.keep_sources, request.arch, say, sizes, chosen)
    report["tiles"] = build.load(output).tiles
    if (reason := declined_here(assembly.schedule, sizes)) is not None:
        report["declined"] = reason
    return report | {"library": str(output), "header": str(output.with_suffix(".h"))}


def _assembly(request: Request, chunk: str | None) -> tuple[Assembly, dict[str, int], dict[str, Tile]]:
    """The kernels and their tiles, the sizes that are known, and the tiles that `coda tune` found best. Sizes that
    kernels would refuse are told now, not when the artifact runs."""
    schedule = build.lowered(request.program, chunk=chunk, dims=request.dims)
    sizes = bind(request.program, {}, request.dims)
    chosen = {} if request.tile else tiles_here(schedule, sizes)
    assembly = build.assemble(schedule, request.tile.split(",") if request.tile else None, sizes, chosen)
    if all(axis.name in sizes for axis in request.program.free_axes):
        for tile in dict.fromkeys(v.tile for v in assembly.variants) or (TILES[0],):
            if reason := planview.refusal(schedule, sizes, tile):
                raise CodaError.of(f"the kernel would refuse these sizes: {reason}")
    return assembly, sizes, chosen


def _generate(assembly: Assembly, folder: Path | None, arch: str) -> dict[str, object]:
    """Generate the sources, and write them where they are wanted."""
    files = build.sources(assembly, build.Metadata(arch))
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
        except OSError as error:
            raise CodaError.of(f"cannot write the sources to {folder}: {error.strerror}") from None
    return {"sources": [str(folder / name) if folder else name for name in files]}
