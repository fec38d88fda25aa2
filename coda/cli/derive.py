"""coda derive: the backward of a program, as a program.

Prints the forward, with what it keeps for the backward, and the backward, with gradients d_NAME for parameters from
gradients d_NAME of results. Both are programs like any other: they check, run and lower. Comments say which rewrites
were made, bitwise or algebraic, and what they moved. With --kernels both are cut into the kernels they become; those
of a program NAME_chunk run once for each chunk of an axis.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from coda.cli.common import add_json, add_request, print_json, write_text
from coda.cli.request import from_args
from coda.ir import Program
from coda.passes import derive, partition
from coda.passes.chunk import chunk
from coda.printer import print_body, print_externs


def add(parser: argparse.ArgumentParser) -> None:
    add_request(parser, "a program (.coda) or a config (.toml)")
    parser.add_argument("--wrt", metavar="NAMES", help="parameters that want gradients (default: all that can)")
    parser.add_argument("--memory", choices=("fast", "low"), default="fast", help="low: recompute products, keep less")
    parser.add_argument(
        "--numerics", choices=("fused", "eager"), default="fused", help="eager: no rewrite moves a rounding"
    )
    parser.add_argument("--kernels", action="store_true", help="cut forward and backward into kernels")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.coda", help="write the programs there")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    request = from_args(args)
    wrt = args.wrt.split(",") if args.wrt else None
    backward, notes = derive(request.program, wrt, numerics=args.numerics, memory=args.memory)
    programs = [backward.forward, backward.backward]
    if backward.chunk is not None:
        cut = chunk(backward.backward, backward.chunk)
        notes += cut.notes
        if args.kernels:
            programs = [backward.forward, *cut.before, cut.body, *([cut.after] if cut.after else [])]
    texts = [t for p in programs for t in (_kernels(p) if args.kernels else [print_body(p)])]
    head = ["".join(f"# {note}\n" for note in notes), print_externs(programs)]
    text = "\n".join([*filter(None, head), *texts])
    if args.output is not None:
        write_text(args.output, text)
    if args.json:
        print_json(
            {"saved": backward.saved, "gradients": backward.gradients, "notes": [str(n) for n in notes], "text": text}
        )
    elif args.output is None:
        print(text, end="")
    return 0


def _kernels(program: Program) -> list[str]:
    """The kernels of a program, each as the program it computes, in launch order."""
    return [f"# {kernel.kind} kernel\n{print_body(kernel.program)}" for kernel in partition(program).kernels]
