"""Factors before a product of low rank: ``x @ w + 2 * (a @ b)`` becomes ``x @ w + (2 * a) @ b``.

An adapter is a product that is scaled and added to another. Scaled behind it, the two cannot be one accumulation
(``merge.py``, kind K); but what ``a`` is made of can be scaled in f32 before it is rounded to be an operand, which
costs nothing. So this is done where ``a`` is computed and rounded anyway, and read by this product alone. Behind a
norm, whose factor r has moved behind the first product, it leaves ``a`` for the sum of both:

    r * (x @ w) + 2 * (cast(r * t) @ b)      becomes      r * (x @ w + cast(2 * t) @ b)

Label: bitwise for a power of two, else algebraic: the rounding of ``a`` moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import frexp

from coda.dtypes import F16
from coda.ir import Node, Program, replaced
from coda.ops import build
from coda.passes.axes import add_all
from coda.passes.labels import BITWISE, Label, Note, note
from coda.passes.terms import is_rounding, multiply

NAME = "scale_in"
MOVED = Label("an operand is scaled before it is rounded, and not by its row factor")


def scale_in(program: Program) -> tuple[Program, tuple[Note, ...]]:
    """The program with the factors of products in a sum before these products, and what was moved."""
    scaler = _Scaler(program)
    for total in reversed(program.nodes()):  # outermost first
        if total.op == "add" and total not in scaler.seen:
            scaler.sum(total)
    if not scaler.moved:
        return program, ()
    return replaced(program, scaler.moved), tuple(scaler.notes)


@dataclass(frozen=True)
class _Adapter:
    """A term of a sum: ``factor`` times a product, whose left operand is ``inner`` rounded, or ``inner`` times a
    factor of rows."""

    factor: float
    dot: Node
    inner: Node

    def scaled(self, without: Node | None) -> Node:
        """The product with the number before it; ``without`` is the factor of rows that stays away."""
        operand = self.dot.args[0]
        inner = self.inner if without is None else _other(self.inner, without)
        number = None if self.factor == 1 else build("const", value=self.factor, dtype=inner.dtype)
        value = build("cast", multiply(number, inner), dtype=operand.dtype, saturate=False, span=operand.span)
        return build("dot", value, self.dot.args[1], span=self.dot.span)


class _Scaler:
    def __init__(self, program: Program):
        self.users, self.stored = program.users(), {o.value for o in program.outputs}
        self.moved: dict[Node, Node] = {}
        self.seen: set[Node] = set()  # sums that are part of another
        self.notes: list[Note] = []

    def alone(self, node: Node) -> bool:
        return len(self.users[node]) == 1 and node not in self.stored

    def terms(self, total: Node) -> list[Node]:
        found: list[Node] = []
        for operand in total.args:
            if operand.op == "add" and self.alone(operand) and operand.type.dims == total.type.dims:
                self.seen.add(operand)
                found += self.terms(operand)
            else:
                found.append(operand)
        return found

    def sum(self, total: Node) -> None:
        terms = self.terms(total)
        adapters = {t: a for t in terms if (a := self.adapter(t)) is not None}
        factors = {t: r for t in terms if t not in adapters and (r := self.row_factor(t)) is not None}
        row = next(iter(factors.values()), None)
        if row is not None and adapters and all(_other(a.inner, row) is not a.inner for a in adapters.values()):
            same = [t for t, r in factors.items() if r is row]
            products = add_all([*(_other(t, row) for t in same), *(a.scaled(row) for a in adapters.values())])
            others = [t for t in terms if t not in adapters and t not in same]
            self.moved[total] = add_all([multiply(row, products), *others])
            self.note(adapters.values(), row)
        elif any(t.op == "dot" and t not in adapters for t in terms):
            scaled = {t: a for t, a in adapters.items() if a.factor != 1}
            self.moved |= {t: a.scaled(None) for t, a in scaled.items()}
            self.note(scaled.values(), None)

    def note(self, adapters: Iterable[_Adapter], row: Node | None) -> None:
        for a in adapters:
            exact = row is None and abs(frexp(a.factor)[0]) == 0.5
            label = BITWISE if exact else MOVED
            self.notes.append(note(NAME, f"the factor {a.factor:g} is before a product", label, a.dot))

    def adapter(self, term: Node) -> _Adapter | None:
        """A term as an adapter. In f16 a value without its factors could leave the range."""
        factor, dot = _scaled_product(term)
        if dot is None or not self.alone(term) or not self.alone(dot):
            return None
        operand = dot.args[0]
        if operand.op != "cast" or not is_rounding(operand) or operand.dtype == F16 or not self.alone(operand):
            return None
        return _Adapter(factor, dot, operand.args[0])

    def row_factor(self, term: Node) -> Node | None:
        """The factor of rows behind a product."""
        if term.op != "mul" or not self.alone(term):
            return None
        dot = next((a for a in term.args if a.op == "dot" and self.alone(a)), None)
        factor = _other(term, dot) if dot is not None else None
        rows = {a.name for dim in dot.type.dims[:-1] for a in dim} if dot is not None else set()
        return factor if factor is not None and factor.type.names and factor.type.names <= rows else None


def _scaled_product(term: Node) -> tuple[float, Node | None]:
    """The number and the product of which a term is the product of both; 1 where there is no number."""
    if term.op == "dot":
        return 1.0, term
    if term.op != "mul":
        return 1.0, None
    number = next((a.attr("value") for a in term.args if a.op == "const"), 0)
    dot = next((a for a in term.args if a.op == "dot"), None)
    return (float(number), dot) if number else (1.0, None)


def _other(product: Node, factor: Node) -> Node:
    """The other factor of a product of two; the value itself where ``factor`` is none of them."""
    if product.op != "mul" or factor not in product.args:
        return product
    return product.args[1] if product.args[0] is factor else product.args[0]
