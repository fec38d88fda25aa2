"""Sums of rows that the next product finishes: no finish kernel, no launch.

A product whose epilogue sums over its columns leaves partials, one for each row and tile. Where all that is made of
them is read by products behind it, these add them up themselves, each row once a tile, in the order of a finish kernel.
What the program also returns, for its backward, the first of them stores. What a row kernel reads is finished by a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from coda.errors import CodaError
from coda.ir import Node, Output, Program, substitute
from coda.ops import build
from coda.ops.reduce import read_of
from coda.passes.kernels import Kernel

MOST_READERS = 2  # products that add up the same partials


def finished_by_readers(
    kernels: Sequence[Kernel], results: Collection[str], accepts: Callable[[Program], object]
) -> list[Kernel]:
    """The kernels without the finish kernels that their readers can do without. ``results`` are what the program
    returns; ``accepts(program)`` raises CodaError where a kernel cannot read partials."""
    found = list(kernels)
    for finish in (k for k in kernels if k.kind == "finish"):
        made = {o.name for o in finish.program.outputs}
        readers = [k for k in found if k.reads & made]
        returned = [o for o in finish.program.outputs if o.name in results]
        fits = 0 < len(readers) <= MOST_READERS and all(o.into is None for o in returned)
        fits = fits and all(k.group is not None and k.group.kind != "M" for k in readers)
        if not fits or not _adds_up_rows(finish, kernels):
            continue
        merged = [replace(k, program=_with(k.program, finish.program, () if i else returned))
                  for i, k in enumerate(readers)]  # fmt: skip
        try:
            for kernel in merged:
                accepts(kernel.program)
        except CodaError:
            continue
        by_name = {k.name: k for k in merged}
        found = [by_name.get(k.name, k) for k in found if k is not finish]
    return found


def _adds_up_rows(finish: Kernel, kernels: Sequence[Kernel]) -> bool:
    """Whether a finish kernel adds up values of rows of products, and nothing else."""

    def has_rows(kernel: Kernel, output: Output) -> bool:
        group = kernel.group
        return group is not None and group.kind != "M" and output.type.dims == group.dots[0].type.dims[:-1]

    unfinished = ((k, o) for k in kernels for o in k.program.outputs if o.is_partial and o.name in finish.reads)
    return all(has_rows(kernel, output) for kernel, output in unfinished)


def _with(program: Program, finish: Program, returned: Sequence[Output]) -> Program:
    """A kernel that computes itself what a finish kernel makes of partials, and stores some of it."""
    made = {o.name for o in finish.outputs}
    new = substitute((o.value for o in program.outputs), {read_of(o.name, o.type): _value(o) for o in finish.outputs})
    outputs = [*(replace(o, value=new[o.value]) for o in program.outputs), *returned]
    params = [p for p in program.params if p.name not in made]
    known = {p.name for p in params}
    params += [p for p in finish.params if p.name not in known]
    names = {new.get(n, n): name for n, name in program.names}
    return Program.of(program.name, params, outputs, names)


def _value(output: Output) -> Node:
    same = output.value.type.dims == output.type.dims
    return output.value if same else build("layout", output.value, dims=output.type.dims)
