"""coda lower: build the artifact of a program, OUT.so and OUT.h.

FILE is a program, or a .toml config, which options override:

    program = "residual_stats.coda"   # relative to the config
    name = "residual_stats"           # when the file has several programs; a list makes one artifact of them
    backward = true                   # build the derived backward, too, for the parameters wrt = ["x"] (default: all)

    [dims]                            # guide the choice of the tile; the artifact serves other sizes, too
    M = 8192

    [consts]                          # values of const parameters
    [dtypes]                          # dtypes of parameters that differ from the source, as in x = "f16"

    [target]
    arch = "sm_90a"
    tile = "128x192"

An artifact may hold several programs: those of a list, a forward and its backward, and of a program with opaque calls
the segments between them, NAME_1, NAME_2 ...; the report says what is called between, with which tensors. With
--backward the forward also returns what the backward reads; `coda derive` prints both.

Building needs nvcc but no GPU; `coda doctor` says what is missing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coda import build
from coda.cli import planview
from coda.cli.common import add_json, add_request, print_json
from coda.cli.progress import progress
from coda.cli.request import ARCHES, Request, all_from_args, size_names
from coda.errors import CodaError
from coda.ir import Program
from coda.passes import derive, fuse
from coda.passes.differentiate import MEMORY
from coda.passes.segments import has_calls, segments
from coda.runtime.binding import bind
from coda.target import TILES
from coda.target.schedule import Assembly
from coda.tuning.use import declined_here, tiles_here


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda) or a config (.toml)")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.so", help="the library; OUT.h is put beside it")
    add_backward(parser)
    parser.add_argument("--arch", choices=ARCHES, help="the target (default: sm_90a)")
    parser.add_argument("--tile", metavar="128x192", help="TileM x TileN; several with commas (default: by --dims)")
    parser.add_argument("--no-build", action="store_true", help="generate the sources only; needs no nvcc")
    parser.add_argument("--keep-sources", type=Path, metavar="DIR", help="put what is compiled, and the log, there")
    add_json(parser)
    parser.set_defaults(usage_error=parser.error)


def add_backward(parser: argparse.ArgumentParser) -> None:
    """The options that say whether there is a backward, and which; see ``parts_of``."""
    parser.add_argument("--backward", action="store_true", help="the derived backward, too")
    parser.add_argument("--wrt", metavar="NAMES", help="parameters that want gradients (default: all that can)")
    parser.add_argument(
        "--memory", choices=MEMORY, default="fast", help="low: recompute products, in chunks; keep less"
    )


@dataclass(frozen=True)
class Part:
    """A program of the artifact. ``chunk`` names the axis in whose chunks its kernels run, where they do."""

    request: Request
    chunk: str | None = None

    @property
    def name(self) -> str:
        return self.request.program.name


Call = dict[str, object]  # of an opaque function: its name, what it reads and writes


def run(args: argparse.Namespace) -> int:
    if args.output is None and not args.no_build:
        args.usage_error("say where the library goes, -o OUT.so, or generate sources only, --no-build")
    if args.output is not None and args.output.suffix != ".so":
        args.usage_error(f"-o {args.output}: the name of the library ends in .so")
    requests = all_from_args(args)
    if (args.wrt or args.memory != "fast") and not args.backward and not any(r.backward for r in requests):
        args.usage_error("--wrt and --memory are about a backward: add --backward")
    found = [part for request in requests for part in parts_of(request, args)]
    parts, calls = [p for p in found if isinstance(p, Part)], [p for p in found if not isinstance(p, Part)]
    name = parts[0].name if len(parts) == 1 else _library_name(args)
    report = _lower(args, name, parts) | ({"calls": calls} if calls else {})
    if args.json:
        print_json(report)
    else:
        print(_text(report))
    return 0


def parts_of(request: Request, args: argparse.Namespace) -> Iterator[Part | Call]:
    """The programs of a request: with its backward where that is wanted, the forward then returns what the backward
    needs as well; and of what calls opaque functions the segments, with the calls, which are the caller's."""
    programs: list[tuple[Program, str | None]] = [(request.program, None)]
    if args.backward or request.backward:
        wrt = args.wrt.split(",") if args.wrt else request.wrt
        derived, _ = derive(request.program, wrt, memory=args.memory)
        programs = [(derived.forward, None), (derived.backward, derived.chunk)]
    for program, chunk in programs:
        if not has_calls(program):
            yield Part(_sized(request, program), chunk)
            continue
        for part in segments(fuse(program).forward):
            if isinstance(part, Program):
                yield Part(_sized(request, part))
            else:
                callee = next(n.attr("callee") for n in part.program.nodes() if n.op == "call")
                reads, writes = ([x.name for x in xs] for xs in (part.program.params, part.program.outputs))
                yield {"call": callee.name, "reads": reads, "writes": writes}


def _sized(request: Request, program: Program) -> Request:
    """The request for a program that was made of another one, and need not have all of its axes."""
    if program is request.program:
        return request
    known = size_names(program)
    return replace(request, program=program, dims={n: s for n, s in request.dims.items() if n in known})


def _library_name(args: argparse.Namespace) -> str:
    """What a library of several programs is called: as a C identifier, for its header."""
    return re.sub(r"\W", "_", Path(args.output or args.file).stem)


def _lower(args: argparse.Namespace, name: str, parts: Sequence[Part]) -> dict[str, object]:
    """Build the artifact, or generate its sources."""
    arch, output = parts[0].request.arch, args.output
    lowered = [_assembly(part) for part in parts]
    programs = [_about(assembly, part.chunk) for part, (assembly, _) in zip(parts, lowered, strict=True)]
    report: dict[str, object] = {"program": name, "arch": arch}
    if args.no_build or output is None:
        report |= _generate(name, [assembly for assembly, _ in lowered], args.keep_sources, arch)
    else:
        with progress(f"building {output}") as say:
            build.build_all(name, [job for _, job in lowered], output, args.keep_sources, arch, say)
        for about in programs:
            about["tiles"] = build.load(output, str(about["program"])).tiles
        report |= {"library": str(output), "header": str(output.with_suffix(".h"))}
    for about, (_, job) in zip(programs, lowered, strict=True):
        if (reason := declined_here(job.schedule, job.dims)) is not None:
            about["declined"] = reason
    return report | (programs[0] if len(programs) == 1 else {"programs": programs})


def _about(assembly: Assembly, chunk: str | None) -> dict[str, object]:
    tiles = list(dict.fromkeys(v.tile.name for v in assembly.variants))
    kernels = [step.name for step in assembly.schedule.steps]
    about: dict[str, object] = {"program": assembly.name, "tiles": tiles, "kernels": kernels}
    return about | ({"chunks": chunk} if chunk else {})


def _text(report: Mapping[str, object], indent: str = "") -> str:
    lines = []
    for key, value in report.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{indent}{key}:", *(_text(v, indent + "  ") + "\n" for v in value)]
        else:
            lines.append(f"{indent}{key}: {', '.join(value) if isinstance(value, list) else value}")
    return "\n".join(lines).rstrip("\n")


def _assembly(part: Part) -> tuple[Assembly, build.Job]:
    """The kernels at their tiles, and what to build. Sizes that kernels would refuse are told now, not when the
    artifact runs."""
    request = part.request
    sizes = bind(request.program, {}, request.dims)
    schedule = build.lowered(request.program, chunk=part.chunk, dims=request.dims)
    tiles = request.tile.split(",") if request.tile else None
    chosen = {} if request.tile else tiles_here(schedule, sizes)  # by `coda tune`
    assembly = build.assemble(schedule, tiles, sizes, chosen)
    if all(axis.name in sizes for axis in request.program.free_axes):
        for tile in dict.fromkeys(v.tile for v in assembly.variants) or (TILES[0],):
            if reason := planview.refusal(schedule, sizes, tile):
                raise CodaError.of(f"'{schedule.name}' would refuse these sizes: {reason}")
    return assembly, build.Job(schedule, sizes, tiles, chosen)


def _generate(name: str, assemblies: Sequence[Assembly], folder: Path | None, arch: str) -> dict[str, object]:
    """Generate the sources, and write them where they are wanted."""
    files = build.sources_of(name, assemblies, build.Metadata(arch))
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(text)
        except OSError as error:
            raise CodaError.of(f"cannot write the sources to {folder}: {error.strerror}") from None
    return {"sources": [str(folder / file) if folder else file for file in files]}
