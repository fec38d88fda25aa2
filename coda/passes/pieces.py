"""Cut axes into pieces: along an axis that is split or joined, a value becomes several, each over a shorter axis.

``split(x, d = f | f | *)`` reads three pieces of ``d`` and ``concat`` puts three together. Afterwards a ``part`` is
only found at leaves, where it is an address, and a ``concat`` only at the root of an output, where it is several
stores.

Label: bitwise, but for reductions over a cut axis: algebraic (pieces are reduced one by one, then combined).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from coda.dtypes import I64
from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Node, Program, Size
from coda.ops import OPS, build

_COMBINE = {"reduce_sum": "add", "reduce_max": "maximum", "reduce_min": "minimum"}


@dataclass(frozen=True)
class Piece:
    """``into.size`` positions of an axis from ``start`` on, called ``into``."""

    start: Size
    into: Axis


def cut_pieces(program: Program) -> Program:
    """The program with every split or joined axis cut at its borders."""
    for axis in _cut_axes(program):
        program = _Cutter(axis, _pieces(program, axis)).run(program)
    return program


def _cut_axes(program: Program) -> list[Axis]:
    found: dict[str, Axis] = {}
    for node in program.nodes():
        if node.op == "part":
            axis = node.args[0].type.axis(node.attr("axis"))
            assert axis is not None
            found.setdefault(axis.name, axis)
        elif node.op == "concat":
            found.setdefault(node.attr("axis").name, node.attr("axis"))
    return list(found.values())


def _fail(message: str, node: Node, hint: str | None = None) -> CodaError:
    return CodaError([Diagnostic(message, node.span, hint)])


def _pieces(program: Program, axis: Axis) -> tuple[Piece, ...]:
    """The pieces in order, from the parts that are read and those that are joined; what nobody names is one, too. They
    are all of the axis, or all of it that is read: the last token of T is a part, wherever T ends."""
    found: dict[Piece, Node] = {}
    for node in program.nodes():
        if node.op == "part" and node.attr("axis") == axis.name:
            found.setdefault(Piece(node.attr("start"), node.attr("into")), node)
        elif node.op == "concat" and node.attr("axis") == axis:
            start: Size = sympy.Integer(0)
            for operand, name in zip(node.args, node.attr("parts"), strict=True):
                into = operand.type.axis(name)
                assert into is not None
                found.setdefault(Piece(start, into), node)
                start += into.size
    ordered: list[Piece] = []
    at: Size = sympy.Integer(0)
    while True:
        piece = next((p for p in found if sympy.simplify(p.start - at) == 0 and p.into.size != 0), None)
        if piece is None and not _is_positive(axis.size - at):
            break
        if piece is None:
            later = [p.start for p in found if _is_positive(p.start - at)]
            end = min(later) if all(s.is_Integer for s in later) and later else axis.size
            piece = Piece(at, Axis.of(f"{axis.name}_{len(ordered)}", end - at))
        ordered.append(piece)
        at = sympy.simplify(at + piece.into.size)
    for piece, node in found.items():
        if piece not in ordered and piece.into.size != 0:
            raise _fail(f"axis '{axis.name}' is cut in two ways, whose borders cross", node, "cut it alike everywhere")
    return tuple(ordered)


def _is_positive(size: Size) -> bool:
    return bool(sympy.simplify(size).is_positive)


class _Cutter:
    def __init__(self, axis: Axis, pieces: tuple[Piece, ...]):
        self.axis, self.pieces = axis, pieces
        covered = sympy.Add(*(p.into.size for p in pieces))
        self.is_whole = sympy.simplify(axis.size - covered) == 0
        self.done: dict[Node, Node] = {}
        self.cut: dict[tuple[Node, int], Node] = {}

    def run(self, program: Program) -> Program:
        return program.with_outputs(replace(o, value=self.whole(o.value)) for o in program.outputs)

    def has_axis(self, node: Node) -> bool:
        return self.axis.name in node.type.names

    def whole(self, node: Node) -> Node:
        """The node; one over the axis becomes the concatenation of its pieces."""
        if node not in self.done:
            self.done[node] = self._joined(node) if self.has_axis(node) else self._without_axis(node)
        return self.done[node]

    def _joined(self, node: Node) -> Node:
        pieces = [self.piece(node, i) for i in self._all(node)]
        names = tuple(p.into.name for p in self.pieces)
        return build("concat", *pieces, axis=self.axis, parts=names, span=node.span)

    def _all(self, node: Node) -> range:
        """The pieces of a node that needs the whole axis."""
        if not self.is_whole:
            message = f"all of axis '{self.axis.name}' is needed, and a part of it that ends who knows where"
            raise _fail(message, node, "give the part a size that is known")
        return range(len(self.pieces))

    def _without_axis(self, node: Node) -> Node:
        """A node that lacks the axis itself, though its operands may have it."""
        if node.op == "part" and node.attr("axis") == self.axis.name:
            if node.attr("into").size == 0:
                raise _fail(f"an empty part of '{self.axis.name}' is used on its own", node)
            return self.piece(node.args[0], self.pieces.index(Piece(node.attr("start"), node.attr("into"))))
        if not any(self.has_axis(a) for a in node.args):
            return (
                build(node.op, *map(self.whole, node.args), span=node.span, **dict(node.attrs)) if node.args else node
            )
        if node.op == "reduce_mean":
            total = self._reduced(node, "reduce_sum")
            count = build("size", expr=sympy.Mul(*(node.args[0].type.axis(a).size for a in node.attr("axes"))))  # type: ignore[union-attr]
            return build("div", total, count, span=node.span)
        if node.op in _COMBINE:
            return self._reduced(node, node.op)
        raise _fail(f"'{node.op.removeprefix('reduce_')}' over axis '{self.axis.name}', which is split", node)

    def _reduced(self, node: Node, op: str) -> Node:
        """A reduction over the axis: of each piece, then of all."""
        results = []
        for i in self._all(node):
            piece = self.pieces[i]
            axes = tuple(piece.into.name if a == self.axis.name else a for a in node.attr("axes"))
            results.append(build(op, self.piece(node.args[0], i), axes=axes, span=node.span))
        total = results[0]
        for result in results[1:]:
            total = build(_COMBINE[op], total, result, span=node.span)
        return total

    def piece(self, node: Node, i: int) -> Node:
        """One piece of a value that may vary over the axis."""
        if not self.has_axis(node):
            return self.whole(node)
        if (node, i) not in self.cut:
            self.cut[node, i] = self._piece(node, i)
        return self.cut[node, i]

    def _piece(self, node: Node, i: int) -> Node:
        piece = self.pieces[i]
        if node.op == "concat" and node.attr("axis") == self.axis:
            kept = [a for a, name in zip(node.args, node.attr("parts"), strict=True) if a.type.axis(name).size != 0]  # type: ignore[union-attr]
            return self.whole(kept[i])
        if node.op == "index":
            position = build("index", axis=piece.into)
            start = build("const", value=int(piece.start), dtype=I64) if piece.start.is_Integer else None
            return build("add", position, start or build("size", expr=piece.start), span=node.span)
        if node.op == "layout":
            return self.piece(node.args[0], i)
        if node.op in ("input", "gather") or (node.op in ("slice", "part", "default") and _is_leaf(node)):
            return build("part", node, axis=self.axis.name, start=piece.start, into=piece.into, span=node.span)
        if node.op in ("cast", "stack", "concat") or OPS[node.op].family in ("pointwise", "reduce"):
            return build(node.op, *(self.piece(a, i) for a in node.args), span=node.span, **dict(node.attrs))
        raise _fail(f"a part of '{node.op}' along '{self.axis.name}' is lowered in a later release", node)


def _is_leaf(node: Node) -> bool:
    while node.op in ("slice", "part", "default"):
        node = node.args[0]
    return node.op in ("input", "gather")
