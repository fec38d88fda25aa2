"""Divisors of whole rows leave sums over a row: ``sum(a * (b / r), N)`` becomes ``sum(a * b, N) / r``.

The backward of a norm reads what its forward stored, ``q = r * acc``, and wants ``acc`` in a sum: ``q / r``. One
division for each row instead of one for each element; on a GPU a division is some ten instructions.

Label: algebraic. Terms are divided after they are added up, in f32.
"""

from __future__ import annotations

from collections.abc import Collection

from coda.ir import Node, Program, replaced
from coda.ops import build, rebuild
from coda.passes.labels import Label, Note, note

NAME = "hoist"


def hoist(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """The program with divisors that do not vary along a sum behind it, and what was moved."""
    users, stored = program.users(), {o.value for o in program.outputs}
    once = {n for n in program.nodes() if len(users[n]) == 1 and n not in stored}
    moved: dict[Node, Node] = {}
    for node in program.nodes():
        if node.op == "reduce_sum" and (found := _quotient(node.args[0], node.attr("axes"), once)) is not None:
            rest, divisor = found
            total = build("reduce_sum", rest, axes=node.attr("axes"), span=node.span)
            moved[node] = build("div", total, divisor, span=node.span)
    label = Label("terms are added before they are divided")
    notes = tuple(note(NAME, "a sum is divided, not its terms", label, node) for node in moved)
    return replaced(program, moved), notes


def _quotient(value: Node, axes: Collection[str], once: Collection[Node]) -> tuple[Node, Node] | None:
    """A value that nothing else reads as (rest, divisor), where the divisor varies, but not over the axes."""
    if value not in once:
        return None
    if value.op == "div":
        rest, divisor = value.args
        return (rest, divisor) if divisor.type.names and not divisor.type.names & set(axes) else None
    if value.op not in ("mul", "add", "sub"):
        return None
    a, b = value.args
    first, second = (_quotient(x, axes, once) for x in value.args)
    if value.op == "mul":
        if second is not None:
            return build("mul", a, second[0], span=value.span), second[1]
        return None if first is None else (build("mul", first[0], b, span=value.span), first[1])
    if first is None or second is None or first[1] is not second[1]:
        return None
    return rebuild(value, [first[0], second[0]]), first[1]
