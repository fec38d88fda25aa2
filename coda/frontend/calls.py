"""Calls: a built-in operation, or a fn of the file or the library, which is inlined.

A fn is generic in the axes it does not name. The axes it names, as ``over`` in ``fn softmax(x[over])``, are found in
its arguments, or given by keyword: ``softmax(x, over=V)``.
"""

from __future__ import annotations

from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.builtins import BUILTINS, axes_argument, call_builtin
from coda.frontend.expressions import is_optional, operand, tensor
from coda.frontend.report import Failed
from coda.frontend.scope import ABSENT, CallSite, Scope, Value
from coda.ir import Dim, Node


def call(scope: Scope, expr: syntax.Call) -> list[Value]:
    """The results of a call: one, except for split and for functions that return several."""
    name = expr.callee.name
    chosen = scope.context.choices.get(name)
    if chosen is not None:
        name = chosen
    function = scope.context.functions.get(name)
    if function is not None:
        return inline(scope, function, expr)
    if name in BUILTINS:
        return call_builtin(scope, name, expr)
    known = set(scope.context.functions) | set(BUILTINS) | set(scope.context.choices)
    hint = did_you_mean(name, known)
    if name in scope.variables or scope.is_axis(name):
        hint = f"'{name}' is no function; a product of two values is written with *"
    raise scope.fail(f"there is no function '{name}'", expr.callee.span, hint)


def inline(scope: Scope, function: syntax.Definition, expr: syntax.Call) -> list[Value]:
    from coda.frontend.statements import run_function

    chain = scope.site.chain if scope.site else ()
    if function in chain:
        path = " -> ".join(f.name.name for f in (*chain, function))
        raise scope.fail(f"fn '{function.name.name}' calls itself ({path})", expr.span, "a fn is inlined: it cannot recurse")
    arguments, axes_given = match_arguments(scope, function, expr)
    site = CallSite(scope.place(expr.span), (*chain, function))
    inner = Scope(scope.context, {}, site)
    axes = bind_axes(scope, function, arguments, axes_given, expr)
    for parameter in function.parameters:
        name = parameter.name
        if name.name in arguments:
            inner.bind(name, arguments[name.name])
        elif parameter.default is not None:
            inner.bind(name, operand(inner, parameter.default))
        else:
            inner.bind(name, ABSENT)
    inner.own_axes = axes
    return run_function(inner, function)


def match_arguments(
    scope: Scope, function: syntax.Definition, expr: syntax.Call
) -> tuple[dict[str, Value], dict[str, Dim]]:
    """The given arguments by parameter, and the axes given by keyword."""
    name, parameters = function.name.name, {p.name.name: p for p in function.parameters}
    named_axes = axes_named(function)
    values: dict[str, Value] = {}
    axes: dict[str, Dim] = {}
    positional = list(parameters)
    for argument in expr.arguments:
        if argument.keyword is None:
            if not positional or positional[0] in values:
                signature = f"{name}({', '.join(parameters)})"
                raise scope.fail(f"too many arguments: '{name}' takes {len(parameters)}", argument.span, f"it is {signature}")
            key = positional.pop(0)
        else:
            key = argument.keyword.name
            if key in named_axes:
                axes[key] = axes_argument(scope, argument)
                continue
            if key not in parameters:
                hint = did_you_mean(key, set(parameters) | named_axes) or f"it has {', '.join([*parameters, *sorted(named_axes)])}"
                raise scope.fail(f"'{name}' has no option '{key}'", argument.keyword.span, hint)
            if key in values:
                raise scope.fail(f"argument '{key}' is given twice", argument.span)
            positional = [p for p in positional if p != key]
        values[key] = operand(scope, argument.value)
    missing = [p for p, q in parameters.items() if p not in values and q.default is None and not q.optional]
    if missing:
        signature = f"{name}({', '.join(parameters)})"
        raise scope.fail(f"'{name}' lacks its argument '{missing[0]}'", expr.span, f"it is {signature}")
    for key, found in values.items():
        if is_optional(scope, found) and not parameters[key].optional:
            tensor(scope, found, expr.span)
    return values, axes


def axes_named(function: syntax.Definition) -> set[str]:
    return {f.name.name for p in function.parameters if p.axes for d in p.axes.dims for f in d}


def bind_axes(
    scope: Scope, function: syntax.Definition, arguments: dict[str, Value], given: dict[str, Dim], expr: syntax.Call
) -> dict[str, Dim]:
    """What the axes a fn names stand for: given by keyword; else where an argument has exactly the dims named, as
    gamma[D]; else by name; else the last axis of the argument, if its last dim is a single axis."""
    bound = dict(given)
    named = [
        ([f.name.name for dim in p.axes.dims for f in dim], node)
        for p in function.parameters
        if p.axes is not None and isinstance(node := arguments.get(p.name.name), Node)
    ]
    for names, node in named:
        if len(names) == len(node.type.dims):
            for name, dim in zip(names, node.type.dims, strict=True):
                bound.setdefault(name, dim)
    for names, node in named:
        for name in names:
            axis = node.type.axis(name)
            if axis is not None:
                bound.setdefault(name, (axis,))
    for names, node in named:
        missing = [n for n in names if n not in bound]
        tail = node.type.dims[len(node.type.dims) - len(missing) :]
        if len(tail) == len(missing) and all(len(dim) == 1 for dim in tail):
            bound.update(zip(missing, tail, strict=True))
        elif missing:
            hint = f"say which one, as in {function.name.name}(..., {missing[0]}=D)"
            message = f"'{function.name.name}' cannot tell which axis of {node.type} is its '{missing[0]}'"
            raise scope.fail(message, expr.span, hint)
    for names, node in named:
        for name in names:
            lacking = [a.name for a in bound[name] if a.name not in node.type.names]
            if lacking:
                message = f"'{function.name.name}' needs axis '{lacking[0]}' in each operand with '{name}', but one is {node.type}"
                raise scope.fail(message, expr.span)
    return bound


__all__ = ["Failed", "call"]
