"""Statements, which programs and functions share: assignment, and results with a declared type."""

from __future__ import annotations

from coda.dtypes import TABLE, DType
from coda.frontend import syntax
from coda.frontend.calls import call
from coda.frontend.expressions import operand, tensor
from coda.frontend.readers import unknown_dtype_hint
from coda.frontend.report import Failed
from coda.frontend.rounding import round_to
from coda.frontend.scope import UNKNOWN, Scope, Value
from coda.ir import Dim, Node, Type


def run_function(scope: Scope, function: syntax.Definition) -> list[Value]:
    """The results of an inlined fn."""
    for statement in function.body[:-1]:
        match statement:
            case syntax.Assign():
                assign(scope, statement)
            case _:
                raise scope.fail("a fn has assignments and ends in one return", statement.span)
    last = function.body[-1] if function.body else None
    if not isinstance(last, syntax.Return):
        raise scope.fail(f"fn '{function.name.name}' returns nothing", function.name.span, "end it with return ...")
    return [typed(scope, operand(scope, r.value), r) for r in last.results]


def assign(scope: Scope, statement: syntax.Assign) -> None:
    """Bind the targets. After an error they are unknown, so that uses of them stay silent; a fn stops instead, since
    its caller reports the error."""
    names = [t.name for t in statement.targets]
    try:
        if len(set(names)) != len(names):
            twice = next(t for t in statement.targets if names.count(t.name) > 1)
            raise scope.fail(f"'{twice.name}' is assigned twice in one statement", twice.span)
        values = assigned(scope, statement)
    except Failed:
        if scope.site:
            raise
        values = [UNKNOWN] * len(names)
    for target, found in zip(statement.targets, values, strict=True):
        try:
            scope.bind(target, found)
        except Failed:
            if scope.site:
                raise
            scope.variables[target.name] = UNKNOWN


def assigned(scope: Scope, statement: syntax.Assign) -> list[Value]:
    count = len(statement.targets)
    if isinstance(statement.value, syntax.Call) and count > 1:
        results = call(scope, statement.value)
        if len(results) != count:
            message = f"{count} names for {len(results)} value{'s' * (len(results) != 1)}"
            raise scope.fail(message, statement.span, f"'{statement.value.callee.name}' gives {len(results)}")
        return results
    if count > 1:
        raise scope.fail(f"{count} names for one value", statement.span, "only split and functions give several values")
    return [typed(scope, operand(scope, statement.value), statement)]


def typed(scope: Scope, found: Value, where: syntax.Assign | syntax.Result) -> Value:
    """The value cast and laid out as its declared type says."""
    if where.type is None:
        return found
    node = tensor(scope, found, where.value.span)
    declared = declared_type(scope, node, where.type)
    node = round_to(node, declared.dtype)
    return node if node.type == declared else scope.build(where.type.span, "layout", node, dims=declared.dims)


def declared_type(scope: Scope, node: Node, written: syntax.TypeSyntax) -> Type:
    """The type written for a value: it must have the value's axes, in any order and grouping."""
    dtype = dtype_of(scope, written.dtype)
    if written.parts_of is not None:
        hint = "write partial(sum(x, D)): f32, which says it already"
        raise scope.fail("partial results are the type of a parameter", written.parts_of.span, hint)
    if written.axes is None:
        return node.type.with_dtype(dtype)
    dims = tuple(tuple(axis for f in dim for axis in factor_axes(scope, f, node)) for dim in written.axes.dims)
    names = [a.name for d in dims for a in d]
    if sorted(names) != sorted(node.type.names):
        have, want = ", ".join(a.name for a in node.type.axes), ", ".join(names)
        hint = "a result has each axis of its value once, in any order and grouping"
        raise scope.fail(f"the value has axes [{have}], its type has [{want}]", written.span, hint)
    return Type(dtype, dims)


def factor_axes(scope: Scope, factor: syntax.Factor, node: Node) -> Dim:
    axis = node.type.axis(factor.name.name) if scope.own_axes is None else None
    axes = (axis,) if axis is not None else scope.find_axes(factor.name.name)
    if axes is None:
        have = ", ".join(a.name for a in node.type.axes)
        raise scope.fail(f"the value has no axis '{factor.name.name}'", factor.span, f"it has [{have}]")
    if factor.size is not None and (len(axes) != 1 or axes[0].size != factor.size):
        size = " * ".join(str(a.size) for a in axes)
        raise scope.fail(f"axis '{factor.name.name}' has size {size}, not {factor.size}", factor.span)
    return axes


def dtype_of(scope: Scope, name: syntax.Name) -> DType:
    if name.name not in TABLE:
        raise scope.fail(f"unknown dtype '{name.name}'", name.span, unknown_dtype_hint(name.name))
    return TABLE[name.name]
