"""What stands between the parentheses of a built-in function: axes, groups, dims, dtypes, and how many."""

from __future__ import annotations

from coda.dtypes import TABLE, DType, from_torch
from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.scope import Scope
from coda.ir import Axis, Dim


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
    aliases = {"float": "f32", "half": "f16", "int8": "s8"}
    dtype = from_torch(name)
    if dtype or name in aliases:
        return f"it is called {dtype or aliases[name]} here"
    return did_you_mean(name, set(TABLE)) or f"one of {', '.join(TABLE)}"
