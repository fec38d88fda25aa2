"""Expressions to IR nodes: names, literals, operators, slices and gathers. Calls are in ``calls``."""

from __future__ import annotations

from coda.dtypes import BOOL, F32, I64, TABLE, DType
from coda.errors import Span, did_you_mean
from coda.frontend import syntax
from coda.frontend.report import Failed
from coda.frontend.rounding import round_operands
from coda.frontend.scope import ABSENT, Marker, Scope, Value
from coda.ir import Node
from coda.ops import OPS

OPERATORS = {op.symbol: op.name for op in OPS.values() if op.symbol and op.arity == 2}

# The value that changes nothing as (left, right) operand; None where an optional operand may not stand.
# x + -0.0 and x - 0.0 give x for every x, which x + 0.0 does not (-0.0).
IDENTITY: dict[str, tuple[float | None, float | None]] = {
    "+": (-0.0, -0.0), "-": (None, 0.0), "*": (1.0, 1.0), "/": (None, 1.0),
}  # fmt: skip


def value(scope: Scope, expr: syntax.Expr) -> Node:
    """The node of an expression that must be a tensor which is there."""
    found = operand(scope, expr)
    return tensor(scope, found, expr.span)


def tensor(scope: Scope, found: Value, span: Span) -> Node:
    if isinstance(found, DType):
        raise scope.fail(f"the dtype {found} is not a value", span, f"to round, write cast(x, {found})")
    if isinstance(found, Marker) or is_optional(scope, found):
        what = f"optional '{found.attr('name')}'" if isinstance(found, Node) else "an optional argument that is absent"
        hint = "an absent operand is the identity of its + or *; elsewhere give its value: default(bias, 0)"
        raise scope.fail(f"{what} is used where it has no identity", span, hint)
    return found


def is_optional(scope: Scope, node: Value) -> bool:
    return isinstance(node, Node) and node.op == "input" and node.attr("name") in scope.context.optional


def operand(scope: Scope, expr: syntax.Expr) -> Value:
    """The value of an expression; it may be an optional parameter or a dtype."""
    match expr:
        case syntax.Number():
            return literal(scope, expr)
        case syntax.Name():
            return named(scope, expr)
        case syntax.Negation(inner):
            return scope.build(expr.span, "neg", value(scope, inner))
        case syntax.Binary():
            return binary(scope, expr)
        case syntax.Attribute():
            return attribute(scope, expr)
        case syntax.Subscript():
            return subscript(scope, expr)
        case syntax.Call():
            return single(scope, expr)
    what = {syntax.Group: "a group of axes", syntax.Axes: "a list of axes", syntax.Parts: "a list of parts"}[type(expr)]
    raise scope.fail(f"{what} is not a value", expr.span)


def single(scope: Scope, expr: syntax.Call) -> Value:
    """A call that must give one value."""
    from coda.frontend.calls import call  # calls take expressions, expressions contain calls

    results = call(scope, expr)
    if len(results) != 1:
        hint = f"give each a name: {', '.join('abcdefgh'[: len(results)])} = {expr.callee.name}(...)"
        raise scope.fail(f"'{expr.callee.name}' gives {len(results)} values where one is needed", expr.span, hint)
    return results[0]


def literal(scope: Scope, number: syntax.Number) -> Node:
    dtype = {bool: BOOL, int: I64, float: F32}[type(number.value)]
    return scope.build(number.span, "const", value=number.value, dtype=dtype)


def named(scope: Scope, name: syntax.Name) -> Value:
    sizes = scope.context.axes.consts
    if name.name in sizes and name.name not in scope.variables and scope.own_axes is None:
        return scope.build(name.span, "size", expr=sizes[name.name])
    if name.name in TABLE and name.name not in scope.variables:
        return TABLE[name.name]
    return scope.read(name)


# Operators.


def binary(scope: Scope, expr: syntax.Binary) -> Value:
    left, right = both(scope, expr.left, expr.right)
    if expr.symbol in IDENTITY:
        if right is ABSENT:
            return left
        if left is ABSENT and IDENTITY[expr.symbol][0] is not None:
            return right
        left, right = (with_identity(scope, v, i) for v, i in zip((left, right), IDENTITY[expr.symbol], strict=True))
    a, b = tensor(scope, left, expr.left.span), tensor(scope, right, expr.right.span)
    if expr.symbol == "@":
        a, b = round_operands(a, b)
    return scope.build(expr.span, OPERATORS[expr.symbol], a, b)


def both(scope: Scope, *exprs: syntax.Expr) -> list[Value]:
    """The operands of an operation, all checked before the first failure leaves it."""
    values, failure = [], None
    for expr in exprs:
        try:
            values.append(operand(scope, expr))
        except Failed as failed:
            failure = failed
    if failure is not None:
        raise failure
    return values


def with_identity(scope: Scope, found: Value, identity: float | None) -> Value:
    if identity is None or not is_optional(scope, found):
        return found
    return scope.build(found.span, "default", found, identity=identity)  # type: ignore[union-attr, arg-type]


# Selections.


def attribute(scope: Scope, expr: syntax.Attribute) -> Node:
    if expr.name.name != "T":
        hint = f"a slice is written with its position: .{expr.name.name}[0]; a transpose .T"
        raise scope.fail(f"'.{expr.name.name}' selects nothing", expr.span, hint)
    return scope.build(expr.span, "transpose", value(scope, expr.value))


def subscript(scope: Scope, expr: syntax.Subscript) -> Node:
    index = expr.index.value
    match expr.value:
        case syntax.Attribute(inner, name) if isinstance(index, syntax.Number) and expr.index.keyword is None:
            return slice_of(scope, value(scope, inner), name, index, expr.span)
    table = value(scope, expr.value)
    if isinstance(index, syntax.Name) and index.name not in scope.variables and scope.is_axis(index.name):
        hint = "where all have as many rows, give both operands the batch, as in x: bf16[E, M, K] @ w: bf16[E, K, N]"
        what = f"a product over ragged parts of axis '{index.name}'"
        raise scope.fail(f"{what} is planned for a later release", expr.span, hint)
    if not table.type.dims:
        raise scope.fail("a scalar cannot be indexed", expr.span)
    keyword = expr.index.keyword
    axis = scope.axis(keyword).name if keyword else table.type.axes[0].name
    return scope.build(expr.span, "gather", table, value(scope, index), axis=axis)


def slice_of(scope: Scope, node: Node, name: syntax.Name, index: syntax.Number, span: Span) -> Node:
    if not isinstance(index.value, int) or isinstance(index.value, bool) or index.value < 0:
        raise scope.fail("the position of a slice is a whole number", index.span, f"write .{name.name}[0]")
    known = node.type.names if scope.own_axes is None else set(scope.own_axes)
    axes = scope.find_axes(name.name)
    if axes is None or len(axes) != 1 or axes[0].name not in node.type.names:
        have = ", ".join(a.name for a in node.type.axes)
        hint = did_you_mean(name.name, set(known)) or f"the value has axes [{have}]"
        raise scope.fail(f"there is no axis '{name.name}' to slice", name.span, hint)
    return scope.build(span, "slice", node, axis=axes[0].name, index=index.value)
