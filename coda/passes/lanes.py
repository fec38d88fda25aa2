"""Unroll lanes: split every value over a lane axis into its positions, so that the epilogue's math is scalar.

A lane axis is a static axis that a program slices (``z.s[0]``) or stacks (``stack(a, b, s)``): gate and up, usually.
Slices move to the leaves (parameters and products), where they become addresses; outputs over the axis become a
``stack`` of their lanes at the root, where it becomes a store. Label: bitwise.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from coda.dtypes import I64
from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Node, Program
from coda.ops import OPS, build

_COMBINE = {"reduce_sum": "add", "reduce_max": "maximum", "reduce_min": "minimum"}


def lane_axes(program: Program) -> tuple[Axis, ...]:
    """The axes that the program slices or stacks, in order of first use."""
    found: dict[str, Axis] = {}
    for node in program.nodes():
        if node.op == "slice":
            axis = node.args[0].type.axis(node.attr("axis"))
            if axis is not None:
                found.setdefault(axis.name, axis)
        elif node.op == "stack":
            found.setdefault(node.attr("axis").name, node.attr("axis"))
    return tuple(found.values())


def unroll_lanes(program: Program) -> Program:
    for axis in lane_axes(program):
        program = _Unroller(axis, program).run(program)
    return program


def _fail(message: str, node: Node, hint: str | None) -> CodaError:
    return CodaError([Diagnostic(message, node.span, hint)])


class _Unroller:
    def __init__(self, axis: Axis, program: Program):
        self.axis = axis
        if axis.static is None:
            first = next(n for n in program.nodes() if n.op == "slice" and n.attr("axis") == axis.name)
            raise _fail(
                f"axis '{axis.name}' is sliced, so its size must be known", first,
                f"give it where the axis is declared, as in ({axis.name}=2 F)",
            )  # fmt: skip
        self.lanes: dict[tuple[Node, int], Node] = {}
        self.rebuilt: dict[Node, Node] = {}

    def run(self, program: Program) -> Program:
        return program.with_outputs(replace(o, value=self.whole(o.value)) for o in program.outputs)

    def _cannot(self, node: Node) -> CodaError:
        name, axis = node.op.removeprefix("reduce_"), self.axis.name
        hint = f"write it over the lanes, as in z.{axis}[0] + z.{axis}[1]" if node.op.startswith("reduce_") else None
        return _fail(f"'{name}' over the lane axis '{axis}' is lowered in a later release", node, hint)

    def has_axis(self, node: Node) -> bool:
        return self.axis.name in node.type.names

    def whole(self, node: Node) -> Node:
        """The node with lanes unrolled below it; one over the axis becomes a stack of its lanes."""
        if self.has_axis(node):
            return build(
                "stack", *(self.lane(node, i) for i in range(self.axis.static or 0)), axis=self.axis, span=node.span
            )
        if node not in self.rebuilt:
            self.rebuilt[node] = self._without_axis(node)
        return self.rebuilt[node]

    def _without_axis(self, node: Node) -> Node:
        """A node that lacks the axis itself, though its operands may have it."""
        if node.op == "slice" and node.attr("axis") == self.axis.name:
            return self.lane(node.args[0], node.attr("index"))
        if node.op in _COMBINE and self.has_axis(node.args[0]):
            return self._reduce(node, node.op)
        if node.op == "reduce_mean" and self.has_axis(node.args[0]) and self.axis.name in node.attr("axes"):
            sizes = [a.size for a in node.args[0].type.axes if a.name in node.attr("axes")]
            total = self._reduce(node, "reduce_sum")
            return build("div", total, build("size", expr=sympy.Mul(*sizes)), span=node.span)
        if any(self.has_axis(a) for a in node.args):
            raise self._cannot(node)
        if not node.args:
            return node
        return build(node.op, *(self.whole(a) for a in node.args), span=node.span, **dict(node.attrs))

    def _reduce(self, node: Node, op: str) -> Node:
        """A reduction whose operand has the axis: combine the lanes, then reduce over what is left."""
        lanes = [self.lane(node.args[0], i) for i in range(self.axis.static or 0)]
        total = lanes[0]
        for lane in lanes[1:]:
            total = build(_COMBINE[op], total, lane, span=node.span)
        axes = tuple(a for a in node.attr("axes") if a != self.axis.name)
        return build(op, total, axes=axes, span=node.span) if axes else total

    def lane(self, node: Node, index: int) -> Node:
        """Position ``index`` of a value that may vary over the axis."""
        if not self.has_axis(node):
            return self.whole(node)
        key = (node, index)
        if key not in self.lanes:
            self.lanes[key] = self._lane(node, index)
        return self.lanes[key]

    def _lane(self, node: Node, index: int) -> Node:
        if node.op == "stack" and node.attr("axis") == self.axis:
            return self.lane(node.args[index], index)
        if node.op == "index":
            return build("const", value=index, dtype=I64)
        if node.op in ("input", "dot"):
            return build("slice", node, axis=self.axis.name, index=index, span=node.span)
        if (
            node.op in ("cast", "default", "partial", "reduce_mean", "part", "concat")
            or node.op in _COMBINE
            or OPS[node.op].family in ("pointwise", "random")
        ):
            return build(node.op, *(self.lane(a, index) for a in node.args), span=node.span, **dict(node.attrs))
        if node.op == "layout":
            return self.lane(node.args[0], index)
        raise self._cannot(node)
