"""The built-in functions with arguments that are not values: axes, dtypes, sizes. The pointwise operations of the
table take values only and need no entry here."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from coda.dtypes import F32
from coda.frontend import syntax
from coda.frontend.cutting import concat, part, split, stack
from coda.frontend.expressions import is_optional, operand, value
from coda.frontend.readers import axes_argument, axis_argument, dims_argument, dtype_argument, positional
from coda.frontend.scope import Scope, Value
from coda.ir import Node
from coda.ops import OPS

REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp")


def call_builtin(scope: Scope, name: str, expr: syntax.Call) -> list[Value]:
    results = BUILTINS[name](scope, name, expr)
    return results if isinstance(results, list) else [results]


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


def pick(scope: Scope, name: str, expr: syntax.Call) -> Node:
    x, axis, index = positional(scope, expr, "pick(z, V, label)", 3)
    node, picked = value(scope, x), axis_argument(scope, axis)
    return scope.build(expr.span, "pick", node, value(scope, index), axis=picked.name)


def index(scope: Scope, name: str, expr: syntax.Call) -> Node:
    (axis,) = positional(scope, expr, "index(V): the position along an axis", 1)
    return scope.build(expr.span, "index", axis=axis_argument(scope, axis))


def position(scope: Scope, name: str, expr: syntax.Call) -> Node:
    (group,) = positional(scope, expr, "position((B T)): the position in a group of axes", 1)
    return scope.build(expr.span, "position", axes=axes_argument(scope, group))


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
    if node.op == "reduce_mean":
        hint = "return partial(sum(x, D)), and divide where it is finished"
        raise scope.fail("a mean has no partial results: it is divided when it is finished", x.span, hint)
    return scope.build(expr.span, "partial", node)


def finish(scope: Scope, name: str, expr: syntax.Call) -> Node:
    (x,) = positional(scope, expr, "finish(stats): what partial results of another program add up to", 1)
    return scope.build(expr.span, "finish", value(scope, x))


def dropout(scope: Scope, name: str, expr: syntax.Call) -> Node:
    message = "'dropout' would promise torch's mask, which depends on how torch launches its kernel"
    hint = "a mask of the position alone is where(rand(seed, offset, [M, D]) >= p, x / (1 - p), 0)"
    raise scope.fail(message, expr.span, hint)


def scatter_add(scope: Scope, name: str, expr: syntax.Call) -> Node:
    hint = "for now return the values and add them outside"
    raise scope.fail("'scatter_add' is planned for a later release", expr.span, hint)


def ragged(scope: Scope, name: str, expr: syntax.Call) -> Node:
    raise scope.fail("'ragged' describes the size of an axis", expr.span, "it stands in dim P = ragged(E, offsets)")


Builtin = Callable[[Scope, str, syntax.Call], "Value | list[Value]"]

BUILTINS: dict[str, Builtin] = {name: pointwise for name, op in OPS.items() if op.surface and op.family == "pointwise"}
BUILTINS |= dict.fromkeys(REDUCTIONS, reduction)
BUILTINS |= {"max": extremum, "min": extremum}
BUILTINS |= {"rand_at": pointwise, "position": position}  # what rand is lowered to: artifacts are read back
BUILTINS |= {
    f.__name__: f
    for f in (
        cast,
        default,
        split,
        part,
        stack,
        concat,
        pick,
        index,
        size,
        rand,
        layout,
        partial,
        finish,
        dropout,
        scatter_add,
        ragged,
    )
}
