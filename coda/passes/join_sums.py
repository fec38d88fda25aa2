"""Sums of reductions become reductions of sums: ``sum(a, N) + sum(b, N)`` becomes ``sum(a + b, N)``.

A backward has one such sum for each use of a statistic, and each would be stored unfinished, one value for each row and
tile. Only where nothing else reads the parts, and where both reduce the same axes.

Label: algebraic; the order of additions changes.
"""

from __future__ import annotations

from coda.ir import Node, Program, rewrite
from coda.ops import build
from coda.passes.labels import Label, Note, note


def join_sums(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """The program with one reduction in place of several that are added up."""
    users, stored = program.users(), {o.value for o in program.outputs}
    notes: list[Note] = []

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        alone = all(len(users[a]) == 1 and a not in stored for a in node.args)
        if node.op != "add" or not alone or any(a.op != "reduce_sum" for a in args):
            return None
        (a,), (b,) = args[0].args, args[1].args
        if args[0].attr("axes") != args[1].attr("axes") or a.type.names != b.type.names:
            return None
        notes.append(
            note("join_sums", "two reductions are one", Label("terms are added before they are reduced"), node)
        )
        return build("reduce_sum", build("add", a, b, span=node.span), axes=args[0].attr("axes"), span=node.span)

    return rewrite(program, visit), tuple(notes)
