"""Random numbers as functions of their position: ``rand(seed, offset, [M, D])`` of row m and column d is that of number
m * |D| + d, whichever kernel and thread computes it. Label: bitwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import sympy

from coda.dtypes import I64
from coda.ir import Dim, Node, Program, dim_size, rewrite
from coda.ops import build
from coda.passes.axes import position


def placed_random(program: Program, groups: Collection[Dim] | None = None) -> Program:
    """The program with random numbers of positions. Axes that stand together as in one of the ``groups`` (by default
    those of the parameters) are counted together: a kernel need not know where one ends."""
    known = {dim for p in program.params for dim in p.type.dims if len(dim) > 1} if groups is None else groups
    cut = {a for n in program.nodes() for a in _cut_axes(n)}
    whole = [dim for dim in known if not cut & {a.name for a in dim}]

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        return _placed(node, args, whole) if node.op == "rand" else None

    return rewrite(program, visit)


def _cut_axes(node: Node) -> tuple[str, ...]:
    """The axes whose parts are values of their own."""
    if node.op in ("slice", "part"):
        return (node.attr("axis"),)
    return (node.attr("axis").name,) if node.op in ("stack", "concat") else ()


def _placed(rand: Node, key: Sequence[Node], groups: Collection[Dim]) -> Node:
    """A random number from its linear position over its axes: a sum, of which each term varies over one loop."""
    runs = list(_runs(rand.attr("axes"), groups))
    at = build("const", value=0, dtype=I64)
    for i, run in enumerate(runs):
        term = position(run)
        if i + 1 < len(runs):
            step = sympy.Mul(*(dim_size(later) for later in runs[i + 1 :]))
            term = build("mul", term, build("size", expr=step))
        at = term if i == 0 else build("add", at, term)
    return build("rand_at", *key, at, span=rand.span)


def _runs(axes: Dim, groups: Collection[Dim]) -> Iterator[Dim]:
    """The axes, those of a group together."""
    while axes:
        run = max((g for g in groups if axes[: len(g)] == g), key=len, default=axes[:1])
        yield run
        axes = axes[len(run) :]
