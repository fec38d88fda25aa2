"""The launches of a lowered program, each a program itself: what it computes, reads and writes, and what that costs.

A step of a schedule is one launch, and one more for each finish kernel behind it. These read what the tiles or blocks
of the first left in the workspace, so a step is cut apart here at the reductions that its kernel only begins. A step of
a loop is launched once for each chunk; what it costs is the sum over all chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy

from coda.cost import Gpu, cost, output_bytes, read_bytes
from coda.ir import Node, Output, Param, Program, Size, dim_size, substitute, topological
from coda.ops import OPS, build
from coda.ops.reduce import partial_of, read_of
from coda.passes.kernels import REASONS
from coda.passes.merge import merge
from coda.passes.naming import Fresh, taken_names
from coda.passes.schedule import LEAVES
from coda.passes.schedule import Schedule as Stages
from coda.printer import statements
from coda.target.blocks import Lowered
from coda.target.plan import BAND, TILES, Plan, Tile, Variant
from coda.target.rowplan import TOTAL_BLOCKS, RowPlan
from coda.target.schedule import Kernel, Loop

RENAMING = {"transpose", "layout", "default", "partial", "finish"}  # no work of their own
FREE = LEAVES | RENAMING


@dataclass(frozen=True)
class Tensor:
    """A tensor that a launch reads or writes: its type as written, and the bytes that move."""

    name: str
    type: str
    bytes: Size


@dataclass(frozen=True)
class Launch:
    """One kernel, or the finish kernels of one. ``reason`` says why it is a kernel of its own, None where a product
    hosts it."""

    name: str
    kind: str  # "gemm", "row", "map", "finish" or "call"
    count: Size  # of launches
    program: Program
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    loop: Loop | None = None  # whose chunks the program sees

    @property
    def reason(self) -> str | None:
        return REASONS.get("call" if self.kind == "opaque" else self.kind)

    @property
    def operations(self) -> tuple[Node, ...]:
        return tuple(n for n in self.program.nodes() if n.op not in FREE)

    @property
    def statements(self) -> list[str]:
        """What it computes, as text."""
        return statements(self.program)

    @property
    def flops(self) -> Size:
        return cost(self.program).flops if self.loop is None else _over(self.loop, cost(self.program).flops)

    @property
    def bytes(self) -> Size:
        return sympy.Add(*(t.bytes for t in (*self.reads, *self.writes)))

    def in_loop(self, loop: Loop) -> Launch:
        """The launches of all chunks of an axis."""
        reads, writes = (
            tuple(replace(t, bytes=_over(loop, t.bytes)) for t in tensors) for tensors in (self.reads, self.writes)
        )
        return replace(self, count=_over(loop, self.count), reads=reads, writes=writes, loop=loop)

    def seconds(self, sizes: Mapping[str, int], gpu: Gpu) -> float | None:
        """The least time on a GPU; None where a size is not known, and of an opaque function."""
        if self.kind == "opaque":
            return None
        flops, moved = (known(x, sizes) for x in (self.flops, self.bytes))
        return None if flops is None or moved is None else max(flops / gpu.bf16_flops, moved / gpu.bytes_per_second)

    def document(self, sizes: Mapping[str, int], gpu: Gpu) -> dict[str, Any]:
        """As JSON. Numbers are None where a size is not known; formulas stand beside them."""
        seconds = self.seconds(sizes, gpu)
        return {
            "name": self.name,
            "kind": self.kind,
            "launches": known(self.count, sizes),
            "operations": self.statements,
            "reads": [_document(t, sizes) for t in self.reads],
            "writes": [_document(t, sizes) for t in self.writes],
            "flops": known(self.flops, sizes),
            "bytes": known(self.bytes, sizes),
            "floor_ms": None if seconds is None else 1e3 * seconds,
            "formulas": {"flops": str(self.flops), "bytes": str(self.bytes)},
            "reason": self.reason,
        }


def known(formula: Size, sizes: Mapping[str, int]) -> int | None:
    """A formula as a number; None where a size is not known."""
    formula = sympy.sympify(formula)
    value = formula.subs({s: sizes[s.name] for s in formula.free_symbols if s.name in sizes})
    return int(value) if value.is_number else None


def _over(loop: Loop, formula: Size) -> Size:
    """The sum over the chunks of an axis: whole ones, and what is left."""
    part, size = dim_size((loop.part,)), dim_size((loop.axis,))
    whole, left = size // loop.width, size % loop.width
    formula = sympy.sympify(formula)
    return whole * formula.subs(part, loop.width) + sympy.Piecewise((formula.subs(part, left), left > 0), (0, True))


def _document(tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"name": tensor.name, "type": tensor.type, "bytes": known(tensor.bytes, sizes)}


def launches(lowered: Lowered, tiles: Mapping[str, Tile]) -> list[Launch]:
    """The launches of a program in order. ``tiles``: of its GEMMs, by name."""
    schedule, unfinished, found = lowered.schedule, dict[str, Size](), list[Launch]()
    for i, (step, part, members) in enumerate(zip(schedule.steps, lowered.parts, schedule.members, strict=True)):
        tile = tiles.get(schedule.leader(step).name, TILES[0])
        for launch in _Step(step, part, tile).launches(min(members, 1)):
            if schedule.loop and i in schedule.loop:
                launch = launch.in_loop(schedule.loop)
            reads = tuple(replace(t, bytes=unfinished.get(t.name, t.bytes)) for t in launch.reads)
            found.append(replace(launch, reads=reads))
            partial = {o.name for o in launch.program.outputs if o.is_partial}
            unfinished |= {t.name: t.bytes for t in launch.writes if t.name in partial}
    return found


def call_launch(call: Program) -> Launch:
    """An opaque call among the launches: what it reads and writes."""
    moved = read_bytes(call)
    reads = tuple(Tensor(p.name, str(p.type), moved[p.name]) for p in call.params if p.name in moved)
    writes = tuple(Tensor(o.name, str(o.type), output_bytes(o)) for o in call.outputs)
    return Launch(call.name, "opaque", 1, call, reads, writes)


class _Step:
    """A step of a schedule, taken apart into its kernel and what finishes it."""

    def __init__(self, step: Kernel, part: Program, tile: Tile):
        self.step, self.part, self.tile = step, part, tile
        results = {arg for f in step.finishings for _, arg, _ in f.results}
        self.finished = [o for o in part.outputs if (o.into or o.name) in results]
        self.late = Stages(part, merge(part)[0]).late if self.finished else set()

    def launches(self, count: int) -> list[Launch]:
        """``count``: 0 where it is part of the launch of a step before."""
        outputs = [o for o in self.part.outputs if o not in self.finished]
        if not self.finished:
            return [self.launch(self.step.name, self.step.kind, count, outputs, {})]
        between = self.between()
        first = self.launch(self.step.name, self.step.kind, 1, [*outputs, *between.values()], {})
        name, count = f"{self.step.name}_finish", len(self.step.finishings)
        return [first, self.launch(name, "finish", count, self.finished, between)]

    def between(self) -> dict[Node, Output]:
        """What the first kernel leaves for the finish kernel: reductions that its tiles begin, and values of rows."""
        fresh, called = Fresh(taken_names(self.part)), dict(self.part.names)
        found = {}
        for node in topological([o.value for o in self.finished], lambda n: () if self.is_first(n) else n.args):
            if not self.is_first(node):
                continue
            begun = node in self.late
            value = build("partial", node, span=node.span) if begun else node
            name = called.get(node, node.op.removeprefix("reduce_"))
            stored = replace(value.type, partial=partial_of(node)) if begun else value.type
            found[node] = Output(fresh(f"{name}_partial" if begun else name), value, stored)
        return found

    def is_first(self, node: Node) -> bool:
        """Whether the first kernel computes a value, or begins it: one of the product, or of reductions of rows. The
        finish kernel computes others itself."""
        inside = topological([node])
        heavy = any(OPS[n.op].family == "reduce" or n.op == "dot" for n in inside)
        if isinstance(self.step, Plan):
            heavy = any(n.op == "dot" for n in inside)
        return heavy and (node not in self.late or not any(a in self.late for a in node.args))

    def launch(self, name: str, kind: str, count: int, outputs: list[Output], between: Mapping[Node, Output]) -> Launch:
        """The launch that makes some outputs of parameters and of what the launch before has left."""
        inputs = {n: read_of(o.name, o.type) for n, o in between.items()}
        new = substitute([o.value for o in outputs], inputs)
        results = [replace(o, value=new[o.value]) for o in outputs]
        used = {n.attr("name") for n in topological(o.value for o in results) if n.op == "input"}
        params = [p for p in self.part.params if p.name in used or any(o.into == p.name for o in results)]
        params += [Param(o.name, o.type) for o in between.values()]
        program = Program.of(name, params, results, {new[n]: called for n, called in self.part.names if n in new})
        moved = read_bytes(program) | {o.name: self.written(o) for o in between.values()}
        reads = tuple(Tensor(p.name, str(p.type), moved[p.name]) for p in params if p.name in moved)
        writes = tuple(Tensor(o.into or o.name, str(o.type), self.written(o)) for o in results)
        return Launch(name, kind, count, program, reads, writes)

    def written(self, output: Output) -> Size:
        """The bytes of an output; a partial one has as many values as the kernel has tiles, bands or blocks."""
        if not output.is_partial:
            return output_bytes(output)
        return output.type.elements * output.type.dtype.bytes * self.partials(output.value.args[0])

    def partials(self, reduction: Node) -> Size:
        rows = dim_size(self.step.rows)
        if isinstance(self.step, RowPlan):
            counted = dict.fromkeys(a for part in self.step.parts for a in part.rows)
            kept = tuple(a for a in counted if a.name in reduction.type.names)
            if kept and reduction.type.names <= {a.name for a in counted}:  # one for each row
                return dim_size(tuple(a for a in counted if a.name in reduction.attr("axes")))
            groups = dim_size(kept)
            return sympy.Min(rows / groups, sympy.ceiling(TOTAL_BLOCKS / groups))
        if set(reduction.attr("axes")) & {a.name for a in self.step.rows}:
            of_all = {a.name for a in self.step.batch} & set(reduction.attr("axes"))
            return sympy.ceiling(rows / BAND) * (dim_size(self.step.batch) if of_all else 1)
        return sympy.ceiling(dim_size(self.step.columns) / Variant(self.step, self.tile, "").columns)
