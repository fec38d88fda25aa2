"""Lower a program in chunks of an axis: a schedule whose steps over the axis are a loop (``coda/passes/chunk.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from coda.ir import Program, Type, topological
from coda.passes.chunk import Chunked, chunk
from coda.passes.numbers import with_head_sizes
from coda.target.blocks import Lowered, lower_noting
from coda.target.legality import DESIGN_SMS, checks
from coda.target.lower import program_args
from coda.target.schedule import Loop, Part, schedule_steps

# Positions in a chunk: tiles of 128 for whole numbers of multiprocessors, so that products with the chunk's rows or
# columns fill every wave, whatever the other side is. The wider, the fewer times sums are read and written. What is
# computed in chunks a second time is to save memory, as the logits of `memory = low`: [8192, NARROW] of bf16 is 138 MB.
WIDE, NARROW = 256 * DESIGN_SMS, 64 * DESIGN_SMS


def lower_along(
    program: Program, axis: str | None, numerics: str = "fused", sizes: Mapping[str, int] | None = None
) -> Lowered:
    """The kernels of a program, in chunks of the axis of this name where there is one. Raises CodaError where there are
    none, or where the arguments do not tell what the kernels must know."""
    lower = lower_noting if axis is None else partial(lower_in_chunks, axis=axis)
    lowered = lower(program, numerics=numerics, sizes=sizes)
    checks(lowered.schedule)
    return lowered


def lower_in_chunks(
    program: Program, axis: str, numerics: str = "fused", sizes: Mapping[str, int] | None = None
) -> Lowered:
    """The kernels of a program in chunks of the axis of this name. Raises CodaError where that cannot be. ``sizes``: as
    for a program that is not cut, see ``lower_noting``."""
    program = with_head_sizes(program, sizes or {})
    cut = chunk(program, axis)
    before = [lower_noting(p, numerics) for p in cut.before]
    body = lower_noting(cut.body, numerics, early=False)  # partials of a chunk have the rows of a chunk
    after = [lower_noting(cut.after, numerics)] if cut.after else []
    first = sum(len(piece.schedule.steps) for piece in before)
    end = first + len(body.schedule.steps)
    loop = Loop(first, end, cut.axis, cut.part, width_of(cut), cut.start, _parts(cut))
    pieces = (*before, body, *after)
    steps = [step for piece in pieces for step in piece.schedule.steps]
    schedule = schedule_steps(program, program_args(program), steps, loop)
    notes = (*cut.notes, *(note for piece in pieces for note in piece.notes))
    return Lowered(schedule, tuple(part for piece in pieces for part in piece.parts), notes)


def width_of(cut: Chunked) -> int:
    """How many positions a chunk has."""
    products = [n for n in cut.body.nodes() if n.op == "dot"]
    again = any(below.op == "dot" for n in products for below in topological(n.args))
    return NARROW if again else WIDE


def _parts(cut: Chunked) -> tuple[Part, ...]:
    types: dict[str, Type] = {p.name: p.type for p in cut.program.params}
    types |= {o.name: o.type for o in cut.program.outputs}
    return tuple(Part(name, of, types[of].dims.index((cut.axis,))) for name, of in cut.parts.items())
