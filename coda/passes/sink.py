"""Row factors move behind what is linear in a product: ``rope(r * acc)`` becomes ``r * rope(acc)``.

A delayed norm leaves its factor right behind the product. Where everything from there to a result is linear (rotations,
slices, sums, factors known without the product), the factor may as well be the last operation. The forward does the
same work; the backward gains: the gradient of r is ``sum(dq * rope(acc))``, and ``rope(acc)`` is ``q / r``, which is in
memory, so the product need not be kept beside q (``save.py``). No rotation is known here; that cos and sin are tables
of one does not matter.

Label: algebraic. The factor multiplies a sum of rounded products instead of each operand; all of it is f32.
"""

from __future__ import annotations

from coda.ir import Node, Program, replaced
from coda.ops import build, rebuild
from coda.passes.labels import Label, Note, note
from coda.passes.save import is_never_zero

NAME = "sink"
_LINEAR = {"add", "sub", "neg", "layout", "transpose", "part", "slice", "stack", "concat"}

Factored = tuple[Node | None, Node]  # a factor of whole rows (None: 1), and what it multiplies


def sink(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """The program with the factors of rows last in every result, and operand of an opaque call, that is linear in
    products, and what was moved."""
    factored: dict[Node, Factored] = {}
    known = _Known(program)
    for node in program.nodes():
        if (found := _factored(node, factored, known)) is not None:
            factored[node] = found
            known.linear[node] = frozenset({node}).union(*(known.linear.get(a, ()) for a in node.args))
    called = dict(program.names)
    stored = {o.value: o.name for o in program.outputs}
    stored |= {a: called.get(a, "an operand") for n in program.nodes() if n.op == "call" for a in n.args}
    moved = {
        value: build("mul", row, rest, span=value.span)
        for value, (row, rest) in factored.items()
        if row is not None and row not in value.args and any(_is_result(value, x) for x in stored)
    }
    if not moved:
        return program, ()
    notes = tuple(
        note(NAME, f"a row factor of '{name}' is behind all that is linear", Label("it multiplies a sum"), value)
        for value in moved
        for x, name in stored.items()
        if _is_result(value, x)
    )
    return replaced(program, moved), notes


def _is_result(value: Node, stored: Node) -> bool:
    """Whether a value is what is stored, but for its rounding and the order of its axes."""
    while stored is not value and stored.op in ("cast", "layout"):
        (stored,) = stored.args
    return stored is value


class _Known:
    """What is known without a product."""

    def __init__(self, program: Program):
        self.below: dict[Node, frozenset[Node]] = {}  # the products that each value depends on
        for node in program.nodes():
            below = frozenset[Node]().union(*(self.below[a] for a in node.args))
            self.below[node] = below | {node} if node.op == "dot" else below
        self.linear: dict[Node, frozenset[Node]] = {}  # what a value that is linear in products is made of

    def without(self, node: Node, value: Node) -> bool:
        """Whether ``node`` is known without the products in which ``value`` is linear: without any product, or as a
        statistic of rows that earlier ones made."""
        return not self.below[node] or (is_never_zero(node) and not self.below[node] & self.linear[value])


def _factored(node: Node, factored: dict[Node, Factored], known: _Known) -> Factored | None:
    """A value that is linear in products as (factor, rest); None where it is not."""
    if node.op == "dot":
        return None, node
    if node.op in ("mul", "div"):
        return _scaled(node, factored, known)
    if node.op not in _LINEAR or any(a not in factored for a in node.args):
        return None
    rows = {factored[a][0] for a in node.args}
    if len(rows) != 1:
        return None
    (row,) = rows
    if row is not None and row.type.names & _cut(node):
        return None
    return row, rebuild(node, [factored[a][1] for a in node.args])


def _scaled(node: Node, factored: dict[Node, Factored], known: _Known) -> Factored | None:
    """A product with something that is known without the products."""
    first, second = node.args
    if first in factored and known.without(second, first):
        row, rest = factored[first]
        if row is None and node.op == "mul" and is_never_zero(second):
            return second, rest
        return row, rebuild(node, [rest, second])
    if second in factored and known.without(first, second) and node.op == "mul":
        row, rest = factored[second]
        if row is None and is_never_zero(first):
            return first, rest
        return row, rebuild(node, [first, rest])
    return None


def _cut(node: Node) -> set[str]:
    """The names of the axes of its operands that an operation cuts or joins."""
    if node.op == "concat":
        return set(node.attr("parts"))
    return {node.attr("axis")} if node.op in ("part", "slice") else set()
