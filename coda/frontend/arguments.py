"""How the arguments of a call meet the parameters of a fn, and its axes those of the arguments.

A fn is generic in the axes it does not name. The axes it names, as ``over`` in ``fn softmax(x[over])``, are found in
its arguments, or given by keyword: ``softmax(x, over=V)``.
"""

from __future__ import annotations

from coda.errors import did_you_mean
from coda.frontend import syntax
from coda.frontend.expressions import is_optional, operand, tensor
from coda.frontend.readers import axes_argument
from coda.frontend.scope import Scope, Value
from coda.ir import Dim, Node, dim_size


def factors(parameter: syntax.Parameter) -> list[syntax.Factor]:
    return [f for dim in parameter.axes.dims for f in dim] if parameter.axes else []


def axes_named(parameter: syntax.Parameter) -> list[str]:
    """The axes that a parameter of a fn names: ['d'] for x[d]."""
    return [f.name.name for f in factors(parameter)]


def parameter_text(parameter: syntax.Parameter) -> str:
    """As in the definition, for hints: gamma[over]?"""
    axes = axes_named(parameter)
    return f"{parameter.name.name}{'[' + ', '.join(axes) + ']' if axes else ''}{'?' * parameter.optional}"


def match_arguments(
    scope: Scope, function: syntax.Definition, expr: syntax.Call
) -> tuple[dict[str, Value], dict[str, Dim]]:
    """The given arguments by parameter, and the axes given by keyword."""
    name = function.name.name
    parameters = {p.name.name: p for p in function.parameters}
    signature = f"it is {name}({', '.join(map(parameter_text, function.parameters))})"
    own_axes = {a for p in function.parameters for a in axes_named(p)}
    values: dict[str, Value] = {}
    axes: dict[str, Dim] = {}
    for argument in expr.arguments:
        key = parameter_of(scope, argument, [p for p in parameters if p not in values], signature, name)
        if key in parameters:
            if key in values:
                raise scope.fail(f"argument '{key}' is given twice", argument.span, signature)
            values[key] = given(scope, argument, parameters[key])
        elif key in own_axes:
            axes[key] = axes_argument(scope, argument.value)
        else:
            hint = did_you_mean(key, set(parameters) | own_axes) or signature
            raise scope.fail(f"'{name}' has no option '{key}'", argument.span, hint)
    for key, parameter in parameters.items():
        if key not in values and parameter.default is None and not parameter.optional:
            raise scope.fail(f"'{name}' lacks its argument '{key}'", expr.span, signature)
    return values, axes


def parameter_of(scope: Scope, argument: syntax.Argument, open_: list[str], signature: str, name: str) -> str:
    """The name of the parameter (or axis) that an argument is for: its keyword, or the next one in order."""
    if argument.keyword is not None:
        return argument.keyword.name
    if not open_:
        raise scope.fail(f"too many arguments for '{name}'", argument.span, signature)
    return open_[0]


def given(scope: Scope, argument: syntax.Argument, parameter: syntax.Parameter) -> Value:
    """The value of an argument; one that may be absent is for parameters that say so."""
    value = operand(scope, argument.value)
    return tensor(scope, value, argument.span) if is_optional(scope, value) and not parameter.optional else value


def bind_axes(
    scope: Scope,
    function: syntax.Definition,
    arguments: dict[str, Value],
    given_axes: dict[str, Dim],
    expr: syntax.Call,
) -> dict[str, Dim]:
    """What the axes that a fn names stand for in this call.

    First those given by keyword; then an argument with exactly the dims named decides, as for gamma[over]; then an
    axis of the same name; then the last dims of the argument, where they are single axes.
    """
    bound = dict(given_axes)
    named = [
        (axes_named(p), node)
        for p in function.parameters
        if p.axes is not None and isinstance(node := arguments.get(p.name.name), Node)
    ]
    for names, node in named:
        if len(names) == len(node.type.dims):
            bound = dict(zip(names, node.type.dims, strict=True)) | bound
    for names, node in named:
        bound = {n: (axis,) for n in names if (axis := node.type.axis(n)) is not None} | bound
    for names, node in named:
        missing = [n for n in names if n not in bound]
        last = node.type.dims[len(node.type.dims) - len(missing) :]
        if len(last) != len(missing) or any(len(dim) != 1 for dim in last):
            message = f"'{function.name.name}' cannot tell which axis of {node.type} is its '{missing[0]}'"
            raise scope.fail(message, expr.span, f"say it: {function.name.name}(..., {missing[0]}=D)")
        bound |= zip(missing, last, strict=True)
    for names, node in named:
        lacking = [a.name for n in names for a in bound[n] if a.name not in node.type.names]
        if lacking:
            message = f"'{function.name.name}' needs axis '{lacking[0]}' in its argument of type {node.type}"
            raise scope.fail(message, expr.span)
    check_sizes(scope, function, bound, expr)
    return bound


def check_sizes(scope: Scope, function: syntax.Definition, bound: dict[str, Dim], expr: syntax.Call) -> None:
    """A size in the axes of a fn, as in z[s=2], is a demand."""
    for factor in (f for p in function.parameters for f in factors(p)):
        axes = bound.get(factor.name.name)
        if factor.size is not None and axes is not None and dim_size(axes) != factor.size:
            found = f"'{' '.join(a.name for a in axes)}' has size {dim_size(axes)}"
            message = f"'{function.name.name}' needs an axis of size {factor.size}, but {found}"
            raise scope.fail(message, expr.span, f"as in [M, ({factor.name.name}={factor.size} F)]")
