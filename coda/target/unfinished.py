"""Sums of rows that the next product finishes: no finish kernel, no launch.

A product whose epilogue sums over its columns leaves partials, one for each row and tile. Where all that is made of
them is read by products behind it, these add them up themselves, each row once a tile, in the order of a finish kernel.
What the program also returns, for its backward, the first of them stores. What a row kernel reads is finished by a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from coda.errors import CodaError
from coda.ir import Node, Output, Program, substitute
from coda.ops import build
from coda.ops.reduce import REDUCTIONS
from coda.passes.partition import Kernel

MOST_READERS = 2  # products that add up the same partials


@dataclass
class Unfinished:
    """Kernels, and for those that finish sums the names of the partials with how they are reduced."""

    kernels: list[Kernel]
    reads: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, str]:
        return self.reads.get(name, {})


def finished_by_readers(
    kernels: Sequence[Kernel], results: Collection[str], accepts: Callable[[Program, dict[str, str]], object]
) -> Unfinished:
    """The kernels without the finish kernels that their readers can do without. ``results`` are what the program
    returns; ``accepts(program, partials)`` raises CodaError where a kernel cannot read partials."""
    found = Unfinished(list(kernels))
    for finish in (k for k in kernels if k.kind == "finish"):
        partials = _partials(finish, kernels)
        made = {o.name for o in finish.program.outputs}
        readers = [k for k in found.kernels if k.reads & made]
        returned = [o for o in finish.program.outputs if o.name in results]
        fits = partials and 0 < len(readers) <= MOST_READERS and all(o.into is None for o in returned)
        if not fits or any(k.group is None or k.group.kind == "M" for k in readers):
            continue
        merged = [replace(k, program=_with(k.program, finish.program, () if i else returned))
                  for i, k in enumerate(readers)]  # fmt: skip
        reads = [found.of(k.name) | partials for k in merged]
        try:
            for kernel, names in zip(merged, reads, strict=True):
                accepts(kernel.program, names)
        except CodaError:
            continue
        found.reads |= {k.name: names for k, names in zip(merged, reads, strict=True)}
        by_name = {k.name: k for k in merged}
        found.kernels = [by_name.get(k.name, k) for k in found.kernels if k is not finish]
    return found


def _partials(finish: Kernel, kernels: Sequence[Kernel]) -> dict[str, str]:
    """What a finish kernel adds up, if it is values of rows of products; else nothing."""
    found: dict[str, str] = {}
    for kernel in kernels:
        for output in kernel.program.outputs:
            if output.is_partial and output.name in finish.reads:
                reduction = output.value.args[0]
                kind = reduction.op.removeprefix("reduce_")
                rows = kernel.group.dots[0].type.dims[0] if kernel.group and kernel.group.kind != "M" else ()
                if output.type.dims != (rows,) or not rows or REDUCTIONS[kind].floats > 1:
                    return {}
                found[output.name] = kind
    return found


def _with(program: Program, finish: Program, returned: Sequence[Output]) -> Program:
    """A kernel that computes itself what a finish kernel makes of partials, and stores some of it."""
    made = {o.name for o in finish.outputs}
    new = substitute((o.value for o in program.outputs), {_input(o): _value(o) for o in finish.outputs})
    outputs = [*(replace(o, value=new[o.value]) for o in program.outputs), *returned]
    params = [p for p in program.params if p.name not in made]
    known = {p.name for p in params}
    params += [p for p in finish.params if p.name not in known]
    names = {new.get(n, n): name for n, name in program.names}
    return Program.of(program.name, params, outputs, names)


def _input(output: Output) -> Node:
    return build("input", name=output.name, type=output.type)


def _value(output: Output) -> Node:
    same = output.value.type.dims == output.type.dims
    return output.value if same else build("layout", output.value, dims=output.type.dims)
