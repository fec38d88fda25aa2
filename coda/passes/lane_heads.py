"""Three lanes and more become heads: the columns (s=3 H d) of GPT-2's fused q, k and v are 3*H heads of d columns.

A slice ``z.s[1]`` is then a part of the heads, from H on, and a ``stack`` over s a ``concat`` of heads, so that the
lowering by heads does the rest. Columns (s=3 N) without heads are cut into runs of equal width first, as any head they
could have had. Label: bitwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Dim, Node, Program, Type, appearing_axes, rewrite, topological
from coda.ops import build
from coda.passes.lanes import lane_axes
from coda.passes.naming import Fresh, taken_names

WIDTHS = (64, 128, 96, 32, 16)  # of the runs that columns without heads are cut into, best first


def lanes_as_heads(program: Program) -> Program:
    """The program with the lanes of a product as heads, where they are more than two, or two that stay apart."""
    for dot in (n for n in program.nodes() if n.op == "dot"):
        columns = dot.type.dims[-1]
        lane, *rest = columns
        several = lane.static != 2 or (len(rest) == 2 and _are_apart(program, lane))
        if lane in lane_axes(program) and lane.static is not None and rest and several:
            fresh = Fresh(taken_names(program) | {a.name for a in program.axes})
            if len(rest) == 1:
                runs = _runs(rest[0], dot, fresh)
                program = _Renaming(rest, runs).run(program)
                rest = list(runs)
            heads = Axis(fresh("heads"), sympy.expand(lane.size * rest[0].size))
            return _LanesAsHeads([lane, rest[0]], (heads,)).run(program)
    return program


def _are_apart(program: Program, lane: Axis) -> bool:
    """Whether no result mixes lanes."""
    reads = [{n.attr("index") for n in topological([o.value]) if n.op == "slice" and n.attr("axis") == lane.name}
             for o in program.outputs]  # fmt: skip
    return all(len(found) == 1 for found in reads)


def _runs(columns: Axis, dot: Node, fresh: Fresh) -> Dim:
    """An axis as runs of equal width."""
    size = columns.static
    width = next((w for w in WIDTHS if size is not None and size % w == 0), None)
    if size is None or width is None:
        what = f"has size {columns.size}" if size is not None else "has no number as its size"
        raise CodaError([Diagnostic(
            f"the columns of a product are split in lanes of '{columns}', which {what}", dot.span,
            f"three lanes and more take a multiple of 16 columns: declare {columns}=768, or give --dims {columns}=768",
        )])  # fmt: skip
    return Axis.of(fresh(f"{columns.name}_run"), size // width), Axis.of(fresh(f"{columns.name}_column"), width)


@dataclass(frozen=True)
class _Renaming:
    """Axes next to each other in a dim become others: one becomes two, or two become one."""

    before: list[Axis]
    after: Dim

    def run(self, program: Program) -> Program:
        def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
            if node.op == "input":
                return build("input", name=node.attr("name"), type=self.type(node.type), span=node.span)
            if node.op == "layout":
                return build("layout", *args, dims=self.dims(node.attr("dims")), span=node.span)
            return self.visit(node, args)

        new = rewrite(program, visit)
        params = tuple(replace(p, type=self.type(p.type)) for p in program.params)
        outputs = tuple(replace(o, type=self.type(o.type)) for o in new.outputs)
        return replace(new, params=params, outputs=outputs, axes=appearing_axes(params, outputs))

    def type(self, type_: Type) -> Type:
        return Type(type_.dtype, self.dims(type_.dims))

    def dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(map(self.dim, dims))

    def dim(self, dim: Dim) -> Dim:
        for i in range(len(dim) - len(self.before) + 1):
            if list(dim[i : i + len(self.before)]) == self.before:
                return (*dim[:i], *self.after, *dim[i + len(self.before) :])
        return dim

    def visit(self, node: Node, args: tuple[Node, ...]) -> Node | None:
        """What becomes of an operation that names an axis; None where it names none of these."""
        names = [a.name for a in self.before]
        if node.op.startswith("reduce_") and set(names) & set(node.attr("axes")):
            if not set(names) <= set(node.attr("axes")):
                raise self.cannot(node)
            axes = [a for a in node.attr("axes") if a not in names] + [a.name for a in self.after]
            return build(node.op, *args, axes=tuple(axes), span=node.span)
        if node.op == "index" and node.attr("axis") in self.before:
            raise self.cannot(node)
        return None

    def cannot(self, node: Node) -> CodaError:
        name, axis = node.op.removeprefix("reduce_"), self.before[0]
        return CodaError([Diagnostic(f"'{name}' along '{axis}', over which columns are lanes", node.span)])


class _LanesAsHeads(_Renaming):
    """A lane axis and that of heads become one axis of heads."""

    def visit(self, node: Node, args: tuple[Node, ...]) -> Node | None:
        lane, heads = self.before
        (joined,) = self.after
        if node.op == "slice" and node.attr("axis") == lane.name:
            start = sympy.expand(node.attr("index") * heads.size)
            return build("part", *args, axis=joined.name, start=start, into=heads, span=node.span)
        if node.op == "stack" and node.attr("axis") == lane:
            return build("concat", *args, axis=joined, parts=(heads.name,) * len(args), span=node.span)
        return super().visit(node, args)
