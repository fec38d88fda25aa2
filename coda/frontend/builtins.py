"""The built-in functions with arguments that are not values: axes, dtypes, sizes. The pointwise operations of the
table take values only and need no entry here."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from coda.dtypes import F32, TABLE, DType
from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.expressions import is_optional, operand, value
from coda.frontend.scope import Scope, Value
from coda.ir import Axis, Dim, Node
from coda.ops import OPS

REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp")


def call_builtin(scope: Scope, name: str, expr: syntax.Call) -> list[Value]:
    results = BUILTINS[name](scope, name, expr)
    return results if isinstance(results, list) else [results]


# Arguments.


def positional(scope: Scope, expr: syntax.Call, usage: str, low: int, high: int | None = None) -> list[syntax.Expr]:
    """The arguments of a call that takes no keywords, with their number checked."""
    for argument in expr.arguments:
        if argument.keyword is not None:
            message = f"'{expr.callee.name}' has no option '{argument.keyword.name}'"
            raise scope.fail(message, argument.keyword.span, f"it is {usage}; a comparison is written with ==")
    count, high = len(expr.arguments), low if high is None else high
    if not low <= count <= high:
        takes = str(low) if low == high else f"{low} to {high}"
        message = f"'{expr.callee.name}' takes {takes} argument{'s' * (takes != '1')}, got {count}"
        raise scope.fail(message, expr.span, f"it is {usage}")
    return [a.value for a in expr.arguments]


def axis_argument(scope: Scope, expr: syntax.Expr) -> Axis:
    if not isinstance(expr, syntax.Name):
        raise scope.fail("expected the name of an axis", expr.span)
    return scope.axis(expr)


def axes_argument(scope: Scope, expr: syntax.Expr) -> Dim:
    """An axis, or axes taken together: ``D`` or ``(s F)``."""
    if isinstance(expr, syntax.Name):
        return scope.axes(expr)
    if isinstance(expr, syntax.Group):
        return tuple(axis for name in expr.names for axis in scope.axes(name))
    raise scope.fail("expected the name of an axis", expr.span, "or a group of axes, as in (s F)")


def dims_argument(scope: Scope, expr: syntax.Expr) -> tuple[Dim, ...]:
    if not isinstance(expr, syntax.Axes):
        raise scope.fail("expected axes in brackets, as in [M, D]", expr.span)
    return tuple(tuple(axis for f in dim for axis in scope.axes(f.name)) for dim in expr.dims)


def dtype_argument(scope: Scope, expr: syntax.Expr) -> DType:
    if isinstance(expr, syntax.Name):
        if expr.name in TABLE and expr.name not in scope.variables:
            return TABLE[expr.name]
        found = scope.variables.get(expr.name)
        if isinstance(found, DType):
            scope.read(expr)
            return found
        raise scope.fail(f"'{expr.name}' is not a dtype", expr.span, unknown_dtype_hint(expr.name))
    raise scope.fail("expected a dtype", expr.span, f"one of {', '.join(TABLE)}")


def unknown_dtype_hint(name: str) -> str:
    from coda.dtypes import from_torch

    aliases = {"float": "f32", "half": "f16", "int8": "s8"}
    dtype = from_torch(name)
    if dtype or name in aliases:
        return f"it is called {dtype or aliases[name]} here"
    return did_you_mean(name, set(TABLE)) or f"one of {', '.join(TABLE)}"


# Functions.


def pointwise(scope: Scope, name: str, expr: syntax.Call) -> Node:
    arity = OPS[name].arity or 1
    usage = f"{name}({', '.join('abcd'[:arity])}): {OPS[name].doc}"
    args = [value(scope, a) for a in positional(scope, expr, usage, arity)]
    return scope.build(expr.span, name, *args)


def reduction(scope: Scope, name: str, expr: syntax.Call) -> Node:
    usage = f"{name}(x, D), or {name}(x, (s F)) over several axes"
    operand_expr, over = positional(scope, expr, usage, 2)
    x = value(scope, operand_expr)
    axes = axes_argument(scope, over)
    return scope.build(expr.span, f"reduce_{name}", x, axes=tuple(a.name for a in axes))


def extremum(scope: Scope, name: str, expr: syntax.Call) -> Node:
    """max(x, N) reduces over an axis; max(a, b) takes the larger of two values."""
    _, second = positional(scope, expr, f"{name}(a, b) of two values or {name}(x, D) over an axis", 2)
    is_axis = isinstance(second, syntax.Name) and second.name not in scope.variables and scope.find_axes(second.name)
    if is_axis or isinstance(second, syntax.Group):
        return reduction(scope, name, expr)
    a, b = (value(scope, argument.value) for argument in expr.arguments)
    return scope.build(expr.span, f"{name}imum", a, b)


def cast(scope: Scope, name: str, expr: syntax.Call) -> Node:
    x, to, *flag = positional(scope, expr, "cast(x, bf16), or cast(x, f8e4m3, saturate)", 2, 3)
    if flag and not (isinstance(flag[0], syntax.Name) and flag[0].name == "saturate"):
        raise scope.fail("the only option of 'cast' is saturate", flag[0].span, "write cast(x, f8e4m3, saturate)")
    return scope.build(expr.span, "cast", value(scope, x), dtype=dtype_argument(scope, to), saturate=bool(flag))


def default(scope: Scope, name: str, expr: syntax.Call) -> Node:
    x, identity = positional(scope, expr, "default(bias, 0)", 2)
    found = operand(scope, x)
    if not isinstance(found, Node) or not is_optional(scope, found):
        hint = "declare it with a ?: bias: bf16[N]?"
        raise scope.fail("the first argument of 'default' is an optional parameter", x.span, hint)
    if not isinstance(identity, syntax.Number):
        raise scope.fail("the second argument of 'default' is a number", identity.span)
    return scope.build(expr.span, "default", found, identity=float(identity.value))


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


def pick(scope: Scope, name: str, expr: syntax.Call) -> Node:
    x, axis, index = positional(scope, expr, "pick(z, V, label)", 3)
    node, picked = value(scope, x), axis_argument(scope, axis)
    return scope.build(expr.span, "pick", node, value(scope, index), axis=picked.name)


def index(scope: Scope, name: str, expr: syntax.Call) -> Node:
    (axis,) = positional(scope, expr, "index(V): the position along an axis", 1)
    return scope.build(expr.span, "index", axis=axis_argument(scope, axis))


def size(scope: Scope, name: str, expr: syntax.Call) -> Node:
    (what,) = positional(scope, expr, "size(D): the size of an axis as a number", 1)
    if scope.own_axes is not None:
        return scope.build(expr.span, "size", expr=sympy.Mul(*(a.size for a in axes_argument(scope, what))))
    return scope.build(expr.span, "size", expr=scope.context.axes.size(what))


def rand(scope: Scope, name: str, expr: syntax.Call) -> Node:
    seed, offset, axes = positional(scope, expr, "rand(seed, offset, [M, D])", 3)
    nodes = [value(scope, e) for e in (seed, offset)]
    for node, e in zip(nodes, (seed, offset), strict=True):
        if node.type.dims or node.dtype.kind != "int":
            message = f"the seed and offset of 'rand' are integer scalars, not {node.type}"
            raise scope.fail(message, e.span, "declare seed: i64[]")
    over = tuple(axis for dim in dims_argument(scope, axes) for axis in dim)
    return scope.build(expr.span, "rand", *nodes, axes=over)


def layout(scope: Scope, name: str, expr: syntax.Call) -> Node:
    x, axes = positional(scope, expr, "layout(x, [M, (s F)]): the axes of a value in another order or grouping", 2)
    return scope.build(expr.span, "layout", value(scope, x), dims=dims_argument(scope, axes))


def partial(scope: Scope, name: str, expr: syntax.Call) -> Node:
    (x,) = positional(scope, expr, "partial(sum(x, D)): one unfinished value for each tile", 1)
    node = value(scope, x)
    if not node.op.startswith("reduce_") or node.dtype != F32:
        raise scope.fail("'partial' stores an unfinished reduction", x.span, "write partial(sum(x, D))")
    return scope.build(expr.span, "partial", node)


def scatter_add(scope: Scope, name: str, expr: syntax.Call) -> Node:
    hint = "for now return the values and add them outside"
    raise scope.fail("'scatter_add' is planned for a later release", expr.span, hint)


def ragged(scope: Scope, name: str, expr: syntax.Call) -> Node:
    raise scope.fail("'ragged' describes the size of an axis", expr.span, "it stands in dim P = ragged(E, offsets)")


Builtin = Callable[[Scope, str, syntax.Call], "Value | list[Value]"]

BUILTINS: dict[str, Builtin] = {name: pointwise for name, op in OPS.items() if op.surface and op.family == "pointwise"}
BUILTINS |= dict.fromkeys(REDUCTIONS, reduction)
BUILTINS |= {"max": extremum, "min": extremum}
BUILTINS |= {
    f.__name__: f
    for f in (cast, default, split, part, stack, concat, pick, index, size, rand, layout, partial, scatter_add, ragged)
}
