"""Local rewrites that keep every bit: a table of rules, applied bottom-up until none fits.

Dead code needs no rule: a program is what its outputs reach. Each rule has a label (``labels.py``), and all of them
are ``bitwise``: the same inputs give the same bits, the sign of zero included. So ``x * 1``, ``x - 0`` and ``x + -0.0``
go, but ``x + 0.0`` stays, because it turns -0.0 into 0.0. Additions are never re-associated, and a cast goes only where
its operand has that rounding already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from coda.dtypes import F32
from coda.frontend.rounding import is_stored
from coda.ir import Axis, Node, Program, rewrite
from coda.ops import build
from coda.passes.labels import BITWISE, Label


@dataclass(frozen=True)
class Rule:
    """``apply(node)`` gives the simpler value, or None where the rule does not fit. The value may differ from the
    node in grouping of axes and in a dtype that holds it exactly: ``simplify`` restores both."""

    name: str
    ops: tuple[str, ...]
    apply: Callable[[Node], Node | None]
    label: Label = BITWISE


def simplify(program: Program) -> Program:
    """The program with every rule applied as often as it fits."""
    single = {node for node, users in program.users().items() if len(users) == 1}
    stored = {o.value for o in program.outputs}
    flipped = {n for n in single - stored if n.op == "dot"}

    def visit(node: Node, args: tuple[Node, ...]) -> Node:
        new = build(node.op, *args, span=node.span, **dict(node.attrs)) if args else node
        if new.op == "transpose" and node.args[0] in flipped and new.args[0].op == "dot":
            return _fixpoint(flip_product(new.args[0]))
        return _fixpoint(new)

    return rewrite(program, visit)


def simplify_value(node: Node) -> Node:
    """One node over operands that are simple already."""
    return _fixpoint(node)


def _fixpoint(node: Node) -> Node:
    while (simpler := _once(node)) is not None:
        node = simpler
    return node


def _once(node: Node) -> Node | None:
    for rule in RULES_OF.get(node.op, ()):
        value = rule.apply(node)
        if value is not None and (fitted := _fit(value, node)) is not None:
            return fitted
    return None


def _fit(value: Node, node: Node) -> Node | None:
    """The value with dtype and dims of the node it replaces; None where it lacks an axis or its dtype is wider."""
    if set(value.type.axes) != set(node.type.axes):
        return None
    if value.dtype != node.dtype:
        if node.dtype != F32 or value.dtype.kind != "float":
            return None
        value = build("cast", value, dtype=F32, saturate=False, span=node.span)  # widening is exact
    if value.type.dims != node.type.dims:
        value = build("layout", value, dims=node.type.dims, span=node.span)
    return value


# Axes.


def flip_product(dot: Node) -> Node:
    """(a @ b).T as b.T @ a.T: the same sums of the same products. Only where nothing else reads a @ b."""
    a, b = dot.args
    left, right = (_fixpoint(build("transpose", x, span=dot.span)) for x in (b, a))
    return build("dot", left, right, span=dot.span)


def _transpose_twice(node: Node) -> Node | None:
    (inner,) = node.args
    return inner.args[0] if inner.op == "transpose" else None


def _void_layout(node: Node) -> Node | None:
    (inner,) = node.args
    if inner.type.dims == node.type.dims:
        return inner
    return build("layout", inner.args[0], dims=node.attr("dims")) if inner.op == "layout" else None


def _slice_of_stack(node: Node) -> Node | None:
    (inner,) = node.args
    if inner.op != "stack" or inner.attr("axis").name != node.attr("axis"):
        return None
    return inner.args[node.attr("index")]


def _stack_of_slices(node: Node) -> Node | None:
    """stack(x.s[0], x.s[1], s)"""
    axis, first = node.attr("axis"), node.args[0]
    if first.op != "slice" or first.attr("axis") != axis.name or first.args[0].type.axis(axis.name) != axis:
        return None
    whole = first.args[0]
    lanes = [build("slice", whole, axis=axis.name, index=i) for i in range(len(node.args))]
    return whole if list(node.args) == lanes else None


def _part_of_concat(node: Node) -> Node | None:
    """part(concat(a, b, d), d, start of b, b's axis)"""
    (inner,) = node.args
    if inner.op != "concat" or inner.attr("axis").name != node.attr("axis"):
        return None
    start: sympy.Expr = sympy.Integer(0)
    for operand, name in zip(inner.args, inner.attr("parts"), strict=True):
        axis = operand.type.axis(name)
        if axis == node.attr("into") and sympy.expand(start - node.attr("start")) == 0:
            return operand
        start += axis.size  # type: ignore[union-attr]
    return None


def _concat_of_parts(node: Node) -> Node | None:
    """concat of all parts of one value, in order"""
    axis, first = node.attr("axis"), node.args[0]
    if first.op != "part" or first.attr("axis") != axis.name or first.args[0].type.axis(axis.name) != axis:
        return None
    start: sympy.Expr = sympy.Integer(0)
    for operand, name in zip(node.args, node.attr("parts"), strict=True):
        into: Axis | None = operand.type.axis(name)
        if into is None or operand is not _part(first.args[0], axis, start, into):
            return None
        start = sympy.expand(start + into.size)
    return first.args[0]


def _joined_roundings(node: Node) -> Node | None:
    """A stack or concat of values that are all rounded alike is rounded as a whole: what is linear stays together."""
    first = node.args[0]
    if any(a.op != "cast" or a.attrs != first.attrs or a.args[0].dtype != first.args[0].dtype for a in node.args):
        return None
    whole = build(node.op, *(a.args[0] for a in node.args), span=node.span, **dict(node.attrs))
    return build("cast", whole, span=node.span, **dict(first.attrs))


def _part(whole: Node, axis: Axis, start: sympy.Expr, into: Axis) -> Node:
    return build("part", whole, axis=axis.name, start=start, into=into)


# Arithmetic.


def _constant(node: Node) -> float | int | None:
    return node.attr("value") if node.op == "const" and node.dtype.kind != "bool" else None


def _times_one(node: Node) -> Node | None:
    for one, other in ((1, 0), (0, 1)):
        if _constant(node.args[one]) == 1 and (one == 1 or node.op == "mul"):
            return node.args[other]
    return None


def _is_zero(node: Node, sign: str) -> bool:
    """Whether a constant is the zero of this sign; of integers there is only one."""
    value = _constant(node)
    if isinstance(value, int):
        return value == 0 and sign == "-"
    return value is not None and repr(float(value)) == f"{sign}0.0".replace("+", "")


def _plus_negative_zero(node: Node) -> Node | None:
    a, b = node.args
    if any(x.dtype.kind != node.dtype.kind for x in (a, b)):
        return None  # x + 0 of a float x and an integer is x + 0.0
    return a if _is_zero(b, "-") else b if _is_zero(a, "-") else None


def _minus_zero(node: Node) -> Node | None:
    a, b = node.args
    return a if _is_zero(b, "+") or (_is_zero(b, "-") and b.dtype.kind == "int") else None


def _negated_twice(node: Node) -> Node | None:
    (inner,) = node.args
    return inner.args[0] if inner.op == "neg" else None


def _equal_branches(node: Node) -> Node | None:
    return node.args[1] if node.args[1] is node.args[2] else None


def _void_cast(node: Node) -> Node | None:
    """A rounding to the dtype that the value is stored in, perhaps widened in between."""
    (inner,) = node.args
    if node.attr("saturate"):
        return None
    if inner.op == "cast" and inner.dtype == F32 and inner.args[0].dtype == node.dtype and is_stored(inner.args[0]):
        return inner.args[0]
    return inner if inner.dtype == node.dtype and is_stored(inner) else None


RULES = (
    Rule("transpose of transpose", ("transpose",), _transpose_twice),
    Rule("layout as it was", ("layout",), _void_layout),
    Rule("slice of stack", ("slice",), _slice_of_stack),
    Rule("stack of all slices", ("stack",), _stack_of_slices),
    Rule("part of concat", ("part",), _part_of_concat),
    Rule("concat of all parts", ("concat",), _concat_of_parts),
    Rule("join of roundings", ("stack", "concat"), _joined_roundings),
    Rule("x * 1, x / 1", ("mul", "div"), _times_one),
    Rule("x + -0.0", ("add",), _plus_negative_zero),
    Rule("x - 0.0", ("sub",), _minus_zero),
    Rule("negated twice", ("neg",), _negated_twice),
    Rule("where of equal branches", ("where",), _equal_branches),
    Rule("cast to the stored dtype", ("cast",), _void_cast),
)

RULES_OF: dict[str, tuple[Rule, ...]] = {}
for _rule in RULES:
    for _op in _rule.ops:
        RULES_OF[_op] = (*RULES_OF.get(_op, ()), _rule)
