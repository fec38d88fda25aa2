"""The gradients of opaque calls: a call of the derivative that the source declares beside the function."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

from coda.errors import CodaError, Diagnostic
from coda.ir import Node, Program
from coda.ops import build
from coda.ops.calls import Extern
from coda.passes.axes import conform
from coda.printer import declaration


def leads(program: Program) -> dict[Node, Node]:
    """For each result of an opaque call that has a gradient the first such result of that call."""
    first: dict[tuple[Extern, tuple[Node, ...]], Node] = {}
    calls = [n for n in program.nodes() if n.op == "call" and n.dtype.kind == "float"]
    return {n: first.setdefault((n.attr("callee"), n.args), n) for n in calls}


def call_gradients(call: Node, reached: Mapping[int, Node], wanted: Collection[int]) -> dict[int, Node]:
    """The gradients of those operands of a call whose positions are wanted, from the gradients ``reached`` of its
    results by their number. Raises CodaError where the declared derivative cannot give them."""
    callee: Extern = call.attr("callee")
    backward = callee.backward or _none(call, wanted)
    known = {name: arg for (name, _), arg in zip(callee.params, call.args, strict=True)}
    for i, (name, _) in enumerate(callee.results):
        known[name] = build("call", *call.args, span=call.span, callee=callee, result=i)
        if i in reached:
            known[f"d_{name}"] = conform(reached[i], known[name].type)
    taken = {name for name, _ in backward.params}
    for i in reached:
        name = f"d_{callee.results[i][0]}"
        if name not in taken:
            _fail(call, f"extern '{backward.name}' does not take '{name}', on which the gradients depend")
    operands = []
    for name, type_ in backward.params:
        if name not in known:
            _fail(call, f"extern '{backward.name}' takes '{name}', but no gradient reaches '{name.removeprefix('d_')}'")
        value = known[name]
        cast = value.dtype != type_.dtype
        operands.append(build("cast", value, dtype=type_.dtype, saturate=False) if cast else value)
    given = {name: i for i, (name, _) in enumerate(backward.results)}
    found = {}
    for position in wanted:
        name = f"d_{callee.params[position][0]}"
        if name not in given:
            _fail(call, f"extern '{backward.name}' does not return '{name}', which is wanted")
        found[position] = build("call", *operands, span=call.span, callee=backward, result=given[name])
    return found


def _none(call: Node, wanted: Collection[int]) -> Extern:
    callee: Extern = call.attr("callee")
    results = [(f"d_{name}", t) for name, t in callee.results if t.dtype.kind == "float"]
    gradients = tuple((f"d_{callee.params[i][0]}", callee.params[i][1]) for i in sorted(wanted))
    suggested = Extern(f"{callee.name}_backward", (*callee.params, *results), gradients)
    _fail(call, f"extern '{callee.name}' has no derivative", f"declare one: {' '.join(declaration(suggested).split())}")


def _fail(call: Node, message: str, hint: str | None = None) -> NoReturn:
    raise CodaError([Diagnostic(message, call.span, hint)])
