"""Calls: a built-in operation, a fn of the file or the library, which is inlined, or an extern, which is opaque."""

from __future__ import annotations

from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.arguments import bind_axes, match_arguments
from coda.frontend.builtins import BUILTINS, call_builtin
from coda.frontend.expressions import operand
from coda.frontend.externs import call_extern
from coda.frontend.scope import ABSENT, CallSite, Scope, Value


def call(scope: Scope, expr: syntax.Call) -> list[Value]:
    """The results of a call: one, except for split and for functions that return several."""
    written = expr.callee.name
    name = scope.context.choices.get(written, written)
    function = scope.context.functions.get(name)
    if function is not None:
        return inline(scope, function, expr)
    if name in scope.context.externs:
        return list(call_extern(scope, scope.context.externs[name], expr))
    if name in BUILTINS:
        return call_builtin(scope, name, expr)
    known = set(scope.context.functions) | set(scope.context.externs) | set(BUILTINS) | set(scope.context.choices)
    hint = did_you_mean(name, known)
    if name in scope.variables or scope.is_axis(name):
        hint = f"'{name}' is not a function; a product is written with *"
    hint = hint or f"built in are {', '.join(sorted(BUILTINS))}"
    raise scope.fail(f"there is no function '{name}'", expr.callee.span, hint)


def inline(scope: Scope, function: syntax.Definition, expr: syntax.Call) -> list[Value]:
    """The results of a fn, its body checked with the arguments in place of the parameters."""
    from coda.frontend.statements import run_function  # statements contain calls

    chain = (*scope.site.chain, function) if scope.site else (function,)
    if function in chain[:-1]:
        path = " -> ".join(f.name.name for f in chain)
        hint = "a fn is inlined: it cannot recurse"
        raise scope.fail(f"fn '{function.name.name}' calls itself ({path})", expr.span, hint)
    scope.context.inlined.add(function.name.name)
    arguments, axes = match_arguments(scope, function, expr)
    own_axes = bind_axes(scope, function, arguments, axes, expr)
    inner = Scope(scope.context, own_axes, CallSite(scope.place(expr.span), chain))
    for parameter in function.parameters:
        name = parameter.name
        if name.name not in arguments:
            arguments[name.name] = ABSENT if parameter.default is None else operand(inner, parameter.default)
        inner.bind(name, arguments[name.name])
    return run_function(inner, function)
