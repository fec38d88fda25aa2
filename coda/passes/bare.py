"""Products whose kernel stores them and no more.

Not every epilogue can be lowered (``coda.target`` says why). Then the product is stored, and what was to be computed
behind it becomes a map or row kernel. It is stored as eager PyTorch would, in the dtype of the matrices around it.
Label: algebraic; a product is rounded before what follows, unless the program does that itself.

A rewrite makes new nodes, but keeps the order of products: so they go by their number in it.
"""

from __future__ import annotations

from collections.abc import Collection

from coda.frontend.rounding import nearest_storage
from coda.ir import Node, Program, rewrite
from coda.ops import build, rebuild
from coda.passes.labels import Label

LABEL = Label("a product is rounded before what follows")


def products(program: Program) -> list[Node]:
    """The products of a program, in the order by which they are numbered."""
    return [n for n in program.nodes() if n.op == "dot"]


def round_bare(program: Program, bare: Collection[int]) -> Program:
    """The program with these products rounded for all that reads them."""
    dots = products(program)
    chosen = {dots[i] for i in bare}

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op == "cast" or chosen.isdisjoint(node.args):
            return None
        pairs = zip(node.args, args, strict=True)
        return rebuild(node, [_rounded(new) if old in chosen else new for old, new in pairs])

    return rewrite(program, visit) if chosen else program


def bare_values(program: Program, bare: Collection[int]) -> set[Node]:
    """What is stored of these products: their roundings, or themselves where something reads them in f32."""
    dots, users = products(program), program.users()
    found: set[Node] = set()
    for dot in (dots[i] for i in bare):
        is_rounded = bool(users[dot]) and all(u.op == "cast" for u in users[dot])
        found |= set(users[dot]) if is_rounded else {dot}
    return found


def _rounded(dot: Node) -> Node:
    dtype = nearest_storage(*dot.args)
    return build("cast", dot, dtype=dtype, saturate=False, span=dot.span) if dtype.bits == 16 else dot
