"""A program with opaque calls as segments: programs without calls, which lower like any other, and the calls between.

The cut is that of ``partition``: kernels up to a call are one segment, kernels behind it the next. A segment returns
what later ones read, and results of the program.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from coda.ir import Output, Param, Program
from coda.passes.kernels import Kernel, Partition, composed

Part = Program | Kernel  # a segment, or a call


def has_calls(program: Program) -> bool:
    return any(n.op == "call" for n in program.nodes())


def segments(partition: Partition) -> tuple[Part, ...]:
    """The segments of a program, and its calls, in the order in which they run."""
    found: list[Part] = []
    kernels = list(partition.kernels)
    runs = [list(run) for _, run in groupby(kernels, lambda k: k.name if k.kind == "call" else "")]
    results = {o.name for o in partition.program.outputs}
    done = 0
    for run in runs:
        done += len(run)
        if run[0].kind == "call":
            found.append(run[0])
            continue
        number = 1 + sum(isinstance(s, Program) for s in found)
        wanted = results.union(*(k.reads for k in kernels[done:]))
        found.append(_segment(f"{partition.program.name}_{number}", run, wanted, partition.program.params))
    return tuple(found)


def _segment(name: str, run: list[Kernel], wanted: Iterable[str], params: Iterable[Param]) -> Program:
    """The program that a run of kernels computes, with those of its tensors that are wanted outside."""
    wanted, known = set(wanted), {p.name: p for p in params}
    written = {o.name for k in run for o in k.program.outputs if o.into is None}
    read = {p.name: p for k in run for p in k.program.params if p.name not in written}
    ordered = [*(p for n, p in known.items() if n in read), *(p for n, p in read.items() if n not in known)]
    made, names = composed(run, ordered)
    outputs = sorted((_bare(o) for n, o in made.items() if n in wanted), key=lambda o: o.into is None)
    return Program.of(name, ordered, outputs, names)


def _bare(output: Output) -> Output:
    """An output whose type alone says how it lies in memory, as in a source."""
    laid_out = output.value.op == "layout" and output.value.args[0].op != "input"
    return replace(output, value=output.value.args[0]) if laid_out else output
