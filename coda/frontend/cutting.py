"""The built-in functions that cut and join axes: split, part, stack, concat."""

from __future__ import annotations

import sympy

from coda.frontend import syntax
from coda.frontend.expressions import value
from coda.frontend.readers import axis_argument, positional
from coda.frontend.scope import Scope, Value
from coda.ir import Axis, Node


def split(scope: Scope, name: str, expr: syntax.Call) -> list[Value]:
    """split(x, d = f | f | *): contiguous parts of an axis; * is the rest, which may be empty."""
    match expr.arguments:
        case (syntax.Argument(None, what), syntax.Argument(syntax.Name() as keyword, syntax.Parts() as parts)):
            x, axis = value(scope, what), scope.axis(keyword)
        case _:
            hint = "it is split(x, d = f | f | *)"
            raise scope.fail("'split' takes a value and the parts of one axis", expr.span, hint)
    results: list[Value] = []
    start = sympy.Integer(0)
    for into in part_axes(scope, axis, parts):
        scope.context.axes.cut_from[into.name] = axis.name
        results.append(scope.build(expr.span, "part", x, axis=axis.name, start=start, into=into))
        start = sympy.expand(start + into.size)
    return results


def part_axes(scope: Scope, axis: Axis, parts: syntax.Parts) -> list[Axis]:
    """The axis of each part; the rest gets an axis of its own, and without one the parts must fill the axis."""
    axes = [None if p is None else part_axis(scope, p) for p in parts.parts]
    if axes.count(None) > 1:
        raise scope.fail("only one part can be the rest", parts.span)
    used = sympy.Add(*(a.size for a in axes if a is not None))
    rest = sympy.expand(axis.size - used)
    if rest.is_negative if None in axes else rest != 0:
        hint = f"give the axis its size, as in dim {axis.name} = {used}" if axis.is_free else "a part * takes the rest"
        raise scope.fail(f"the parts add up to {used}, but axis '{axis.name}' has size {axis.size}", parts.span, hint)
    return [a or scope.context.axes.fresh(f"{axis.name}_rest", rest) for a in axes]


def part_axis(scope: Scope, part: syntax.Name | syntax.Number) -> Axis:
    if isinstance(part, syntax.Number):
        raise scope.fail("a part is named", part.span, f"declare its axis: dim f = {part.value}")
    return scope.axis(part)


def part(scope: Scope, name: str, expr: syntax.Call) -> Node:
    """part(x, d, start, f): one part of an axis, as split makes them."""
    x, axis, start, into = positional(scope, expr, "part(x, d, start, f)", 4)
    node, cut, new = value(scope, x), axis_argument(scope, axis), axis_argument(scope, into)
    scope.context.axes.cut_from.setdefault(new.name, cut.name)
    return scope.build(expr.span, "part", node, axis=cut.name, start=scope.context.axes.size(start), into=new)


def stack(scope: Scope, name: str, expr: syntax.Call) -> Node:
    *values, axis = positional(scope, expr, "stack(a, b, s): a new axis s from values of equal axes", 2, 64)
    if not isinstance(axis, syntax.Name):
        raise scope.fail("the last argument of 'stack' names the new axis", axis.span, "write stack(a, b, s)")
    nodes = [value(scope, v) for v in values]
    return scope.build(expr.span, "stack", *nodes, axis=scope.new_axis(axis, sympy.Integer(len(nodes))))


def concat(scope: Scope, name: str, expr: syntax.Call) -> Node:
    """concat(a, b, d): joined along d. Which axis of each value is joined: ``d = f | f`` says it; else it is d or a
    part of d, else the one axis that the values do not share."""
    if len(expr.arguments) < 2:
        hint = "it is concat(a, b, d), or concat(a, b, d = f | g)"
        raise scope.fail("'concat' takes values and an axis", expr.span, hint)
    *values, last = expr.arguments
    if any(a.keyword for a in values):
        raise scope.fail("only the axis of 'concat' has a name before '='", expr.span, "write concat(a, b, d = f | g)")
    nodes = [value(scope, a.value) for a in values]
    if last.keyword is not None:
        target, joined = last.keyword, joined_as_written(scope, last.value, len(nodes))
    elif isinstance(last.value, syntax.Name):
        target = last.value
        joined = [joined_axis(scope, n, nodes, target) for n in nodes]
    else:
        raise scope.fail("the last argument of 'concat' names the axis", last.span, "write concat(a, b, d)")
    for node, axis_name in zip(nodes, joined, strict=True):
        if node.type.axis(axis_name) is None:
            raise scope.fail(f"there is no axis '{axis_name}' to join in {node.type}", expr.span)
    if scope.find_axes(target.name):
        axis = scope.axis(target)
    else:
        sizes = [a.size for n, j in zip(nodes, joined, strict=True) for a in n.type.axes if a.name == j]
        axis = scope.new_axis(target, sympy.expand(sympy.Add(*sizes)))
    return scope.build(expr.span, "concat", *nodes, axis=axis, parts=tuple(joined))


def joined_as_written(scope: Scope, parts: syntax.Expr, count: int) -> list[str]:
    names = parts.parts if isinstance(parts, syntax.Parts) else (parts,)
    if len(names) != count or not all(isinstance(n, syntax.Name) for n in names):
        message = f"expected the axis joined in each of the {count} values"
        raise scope.fail(message, parts.span, "write concat(a, b, d = f | g)")
    return [scope.axis(n).name for n in names if isinstance(n, syntax.Name)]


def joined_axis(scope: Scope, node: Node, nodes: list[Node], target: syntax.Name) -> str:
    axes = scope.find_axes(target.name)
    goal = axes[0].name if axes and len(axes) == 1 else target.name
    cut_from = scope.context.axes.cut_from
    shared = frozenset.intersection(*(n.type.names for n in nodes))
    for candidates in (
        [a.name for a in node.type.axes if a.name == goal or cut_from.get(a.name) == goal],
        [a.name for a in node.type.axes if a.name not in shared],
    ):
        if len(candidates) == 1:
            return candidates[0]
    hint = f"write concat(a, b, {target.name} = f | g)"
    raise scope.fail(f"it is not clear which axis of {node.type} is joined into '{target.name}'", target.span, hint)
