"""Push parts to the leaves: ``split`` becomes addresses, ``concat`` becomes the outputs of one value in several pieces.

``part(x, d, start, f)`` moves down through elementwise operations and reductions over other axes until it meets a
parameter, a product or a gather, where it is an offset. What is left above is scalar math over the small axis. A
``concat`` at the root of an output stays: its operands are the pieces the output is stored from. Elementwise operations
above it, as in ``r * concat(a, b, d)``, are done to each piece. Label: bitwise.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Node, Program, Size
from coda.ops import OPS, build

LEAVES = ("input", "dot", "gather")


def push_parts(program: Program) -> Program:
    pusher = _Pusher()
    return program.with_outputs(replace(o, value=pusher.whole(o.value)) for o in program.outputs)


class _Pusher:
    def __init__(self) -> None:
        self.done: dict[Node, Node] = {}

    def whole(self, node: Node) -> Node:
        """The node with every part below it pushed down."""
        if node not in self.done:
            if node.op == "part":
                self.done[node] = self.part(self.whole(node.args[0]), *_cut(node))
            elif not node.args or node.op == "dot":
                self.done[node] = node
            else:
                new = build(node.op, *map(self.whole, node.args), span=node.span, **dict(node.attrs))
                self.done[node] = self.joined(new)
        return self.done[node]

    def joined(self, node: Node) -> Node:
        """An elementwise operation over a ``concat`` as a ``concat`` of its pieces."""
        concat = next((a for a in node.args if a.op == "concat"), None)
        if concat is None or OPS[node.op].family != "pointwise":
            return node
        axis, start, pieces = concat.attr("axis"), sympy.Integer(0), []
        for name, operand in zip(concat.attr("parts"), concat.args, strict=True):
            into = operand.type.axis(name)
            assert into is not None
            args = [self.part(a, axis.name, start, into) for a in node.args]
            pieces.append(self.joined(build(node.op, *args, span=node.span, **dict(node.attrs))))
            start += into.size
        return build("concat", *pieces, axis=axis, parts=concat.attr("parts"), span=node.span)

    def part(self, node: Node, axis: str, start: Size, into: Axis) -> Node:
        """The cut of an already pushed node."""
        if axis not in node.type.names:
            return node
        if node.op == "concat" and node.attr("axis").name == axis:
            return self._piece(node, axis, start, into)
        if node.op in ("slice", "part", "default") or node.op in LEAVES:
            return build("part", node, axis=axis, start=start, into=into, span=node.span)
        if node.op == "index":
            counted = build("index", axis=into)
            return build("add", counted, build("size", expr=start)) if start != 0 else counted
        elementwise = node.op in ("cast", "layout") or OPS[node.op].family in ("pointwise", "reduce", "random")
        if not elementwise:
            raise CodaError([Diagnostic(f"a part of '{node.op}' along '{axis}' is not lowered yet", node.span)])
        attrs = dict(node.attrs)
        if node.op == "layout":
            return self.part(node.args[0], axis, start, into)
        return build(node.op, *(self.part(a, axis, start, into) for a in node.args), span=node.span, **attrs)

    def _piece(self, node: Node, axis: str, start: Size, into: Axis) -> Node:
        """A cut of a concat that is exactly one of its operands."""
        offset: Size = sympy.Integer(0)
        for operand, name in zip(node.args, node.attr("parts"), strict=True):
            size = operand.type.axis(name).size  # type: ignore[union-attr]
            if sympy.simplify(offset - start) == 0 and sympy.simplify(size - into.size) == 0:
                return self.part(operand, name, sympy.Integer(0), into) if name != into.name else operand
            offset += size
        raise CodaError([Diagnostic(f"a cut of '{axis}' that crosses a concat is not lowered yet", node.span)])


def _cut(node: Node) -> tuple[str, Size, Axis]:
    return node.attr("axis"), node.attr("start"), node.attr("into")
