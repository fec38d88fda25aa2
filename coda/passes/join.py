"""Join products along their columns: q, k and v from three weights become one product of a weight that is never made.

``h @ wq.T``, ``h @ wk.T`` and ``h @ wv.T`` over heads of equal size are parts of ``h @ concat(wq, wk, wv).T``. The
concat stays symbolic: the kernel has a tensor map for each weight, and each tile of columns reads the one it lies in.
Label: bitwise.
"""

from __future__ import annotations

import sympy

from coda.ir import Axis, Node, Program, rewrite
from coda.ops import build


def join_products(program: Program) -> Program:
    """The program with its products joined, or as it is where they are not columns of one product by heads."""
    dots = [n for n in program.nodes() if n.op == "dot"]
    if len(dots) < 2 or not _joinable(dots):
        return program
    heads = [dot.type.dims[1][0] for dot in dots]
    joined = Axis.of(_fresh("heads", program), sympy.Add(*(a.size for a in heads)))
    weights = [dot.args[1].args[0] for dot in dots]
    weight = build("concat", *weights, axis=joined, parts=tuple(a.name for a in heads))
    product = build("dot", dots[0].args[0], build("transpose", weight), span=dots[0].span)
    start, parts = sympy.Integer(0), {}
    for dot, axis in zip(dots, heads, strict=True):
        parts[dot] = build("part", product, axis=joined.name, start=start, into=axis, span=dot.span)
        start += axis.size
    return rewrite(program, lambda node, args: parts.get(node))


def _joinable(dots: list[Node]) -> bool:
    """Whether all share the left operand, and their weights are parameters [(heads columns), K] of one dtype."""
    first = dots[0]
    if len(first.type.dims) != 2:
        return False
    for dot in dots:
        weight = dot.args[1].args[0] if dot.args[1].op == "transpose" else dot.args[1]
        columns = dot.type.dims[1]
        alike = dot.args[0] is first.args[0] and len(columns) > 1 and columns[1:] == first.type.dims[1][1:]
        if not alike or weight.op != "input" or dot.args[1].op != "transpose":
            return False
    return len({id(dot) for dot in dots}) > 2 or first.type.dims[1] != dots[1].type.dims[1]


def _fresh(name: str, program: Program) -> str:
    used = {a.name for a in program.axes} | {a.name for n in program.nodes() for a in n.type.axes}
    while name in used:
        name += "_"
    return name
