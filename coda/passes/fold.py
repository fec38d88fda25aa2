"""Column factors fold into frozen weights: ``(h * g) @ w.T`` becomes ``h @ (w * g).T``.

The weight is then prepared once for each of its versions, and ``h * g`` need not be written at all. Only where
everything that goes into the new weight is frozen, and where no product that reads ``h * g`` keeps it alive.

Label: algebraic; the rounding moves from ``h * g`` to ``w * g``.
"""

from __future__ import annotations

from collections.abc import Callable

from coda.ir import Node, Program, rewrite, topological
from coda.ops import build
from coda.passes.axes import conform
from coda.passes.labels import Label, Note, note
from coda.passes.terms import Term, rounded, scaled_weight, separate

NAME = "fold"


def fold(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """The program with vectors over contracted axes in frozen weights."""
    is_frozen = _frozen(program)
    users, stored = program.users(), {o.value for o in program.outputs}
    notes: list[Note] = []

    def may_fold(dot: Node) -> bool:
        """Whether the left operand is for products with frozen weights alone."""
        left = dot.args[0]
        readers = users[left]
        return left not in stored and all(u.op == "dot" and u.args[0] is left and is_frozen(u.args[1]) for u in readers)

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op != "dot" or not may_fold(node):
            return None
        term = _column_factor(args[0])
        if term is None or term.row is None or not is_frozen(term.row):
            return None
        left = conform(rounded(term.rest, args[0].dtype), args[0].type)
        notes.append(note(NAME, "a vector is folded into the weight", Label("the weight is rounded with it"), node))
        return build("dot", left, scaled_weight(args[1], term.row), span=node.span)

    return rewrite(program, visit), tuple(notes)


def _column_factor(left: Node) -> Term | None:
    """A left operand as one term whose ``row`` varies over the contracted axes (the roles of the axes are swapped)."""
    inner = frozenset(a.name for a in left.type.dims[-1])
    terms = separate(left, inner, left.type.names - inner).terms
    return terms[0] if len(terms) == 1 and terms[0].tile is not None else None


def _frozen(program: Program) -> Callable[[Node], bool]:
    frozen = {p.name for p in program.params if p.frozen}

    def is_frozen(value: Node) -> bool:
        read = {n.attr("name") for n in topological([value]) if n.op == "input"}
        return bool(read) and read <= frozen

    return is_frozen
