"""Proof that two programs are equal over the reals, element by element, on small axes.

Every element of a result becomes a sympy expression in the elements of the operands. A rewrite moves sums, products
and quotients around other functions and never looks into those, so ``rsqrt``, ``silu``, ``where`` ... are left
uninterpreted: an application is a new unknown, the same one for equal arguments. What remains is an identity of
rational functions, which sympy decides. Where the polynomials would grow too large the elements of the operands are
random rationals instead; the arithmetic stays exact, and two different rational functions agree at a random point with
a probability of about degree / range (Schwartz 1980, Zippel 1979).

Rounding is not seen here: that two programs are equal over the reals says nothing about their bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import sympy

from coda.errors import CodaError
from coda.ir import Axis, Node, Program
from coda.ops import OPS

SYMBOLIC_PRODUCTS = 2  # programs with more products than this are evaluated at random rationals
POINTS = 3
RANGE = 10**4

Position = Mapping[str, int]


@dataclass(frozen=True)
class Proof:
    """Whether two programs are equal, how that was found out, and where they differ."""

    holds: bool
    method: str
    difference: str | None = None

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return f"equal over the reals ({self.method})" if self.holds else f"not equal: {self.difference}"


def prove(
    before: Program, after: Program, sizes: Mapping[str, int] | None = None, symbolic: bool | None = None
) -> Proof:
    """Compare the outputs that both programs have. ``sizes`` gives free axes (by default 2 and 3 by turns)."""
    names = [o.name for o in before.outputs if any(o.name == p.name for p in after.outputs)]
    if not names:
        raise CodaError.of(f"'{before.name}' and '{after.name}' have no output in common")
    sizes = _sizes(before, after) | dict(sizes or {})
    if symbolic is None:
        symbolic = max(sum(n.op == "dot" for n in p.nodes()) for p in (before, after)) <= SYMBOLIC_PRODUCTS
    shown = ", ".join(f"{n}={s}" for n, s in sizes.items())
    method = f"symbolic, {shown}" if symbolic else f"exact, at {POINTS} random rational points, {shown}"
    for seed in [None] if symbolic else range(POINTS):
        unknowns = _Unknowns(seed)
        elements = [_Elements(p, sizes, unknowns) for p in (before, after)]
        for name in names:
            if difference := _first_difference(name, *elements):
                return Proof(False, method, difference)
    return Proof(True, method)


def _sizes(*programs: Program) -> dict[str, int]:
    symbols = {s.name: None for p in programs for a in p.axes for s in sorted(a.size.free_symbols, key=str)}
    return {name: 2 + i % 2 for i, name in enumerate(symbols)}


def _first_difference(name: str, before: _Elements, after: _Elements) -> str | None:
    a, b = before.output(name), after.output(name)
    for position, x in a.items():
        if _normal(x - b[position]) != 0:
            return f"{name}[{', '.join(f'{axis}={i}' for axis, i in position)}]"
    return None


def _normal(x: Any) -> Any:
    """The normal form of a rational function of unknowns."""
    x = sympy.sympify(x)
    return x if x.is_Atom else sympy.cancel(sympy.together(x))


class _Unknowns:
    """What both programs share: the elements of operands and the applications of uninterpreted functions."""

    def __init__(self, seed: int | None):
        self.seed = seed  # None: operands are symbols
        self.applied: dict[tuple[Any, ...], sympy.Symbol] = {}

    def operand(self, name: str) -> Any:
        if self.seed is None:
            return sympy.Symbol(name)
        generator = random.Random(f"{self.seed} {name}")
        return sympy.Rational(generator.randint(1, RANGE), generator.randint(1, RANGE))

    def apply(self, function: str, arguments: Sequence[Any]) -> Any:
        """The unknown that stands for a function of these arguments."""
        return self.applied.setdefault((function, *arguments), sympy.Symbol(f"{function}{len(self.applied)}"))


class _Elements:
    """The elements of a program's values, as sympy expressions, each computed once."""

    def __init__(self, program: Program, sizes: Mapping[str, int], unknowns: _Unknowns):
        self.program, self.unknowns = program, unknowns
        self.symbols = {sympy.Symbol(n, integer=True, positive=True): s for n, s in sizes.items()}
        self.cache: dict[tuple[Node, tuple[int, ...]], Any] = {}

    def output(self, name: str) -> dict[tuple[tuple[str, int], ...], Any]:
        """The elements of an output, keyed by (axis, position) sorted by axis: layouts may differ."""
        (value,) = (o.value for o in self.program.outputs if o.name == name)
        axes = sorted(value.type.axes, key=lambda a: a.name)
        points = product(*(range(self.size(a.size)) for a in axes))
        keys = (tuple(zip([a.name for a in axes], point, strict=True)) for point in points)
        return {key: self.at(value, dict(key)) for key in keys}

    def size(self, size: sympy.Expr) -> int:
        value = size.subs(self.symbols)
        if not value.is_Integer or value < 0:
            raise CodaError.of(f"the size {size} is {value}; give sizes that fit")
        return int(value)

    def at(self, node: Node, position: Position) -> Any:
        key = (node, tuple(position[a.name] for a in node.type.axes))
        if key not in self.cache:
            self.cache[key] = self.element(node, {a.name: position[a.name] for a in node.type.axes})
        return self.cache[key]

    def element(self, node: Node, at: Position) -> Any:
        if node.op in _ELEMENTS:
            return _ELEMENTS[node.op](self, node, at)
        if OPS[node.op].family == "reduce":
            return self.reduced(node, at)
        arguments = [_normal(self.at(a, at)) for a in node.args]
        if node.op in _ARITHMETIC:
            return _normal(_ARITHMETIC[node.op](*arguments))
        return self.unknowns.apply(node.op, arguments)

    def positions(self, axes: Sequence[Axis]) -> list[dict[str, int]]:
        ranges = [range(self.size(a.size)) for a in axes]
        return [dict(zip([a.name for a in axes], point, strict=True)) for point in product(*ranges)]

    def reduced(self, node: Node, at: Position) -> Any:
        (operand,) = node.args
        over = [a for a in operand.type.axes if a.name in node.attr("axes")]
        values = [self.at(operand, {**at, **p}) for p in self.positions(over)]
        if node.op == "reduce_sum":
            return _normal(sum(values))
        if node.op == "reduce_mean":
            return _normal(sum(values) / sympy.Integer(len(values)))
        return self.unknowns.apply(node.op, sorted(map(_normal, values), key=str))

    def input(self, node: Node, at: Position) -> Any:
        """An element of a parameter. Integers are positions: 0 or 1."""
        if node.dtype.kind != "float":
            return sympy.Integer(sum(at.values()) % 2)
        return self.unknowns.operand("_".join([node.attr("name"), *(f"{a}{i}" for a, i in sorted(at.items()))]))

    def concat(self, node: Node, at: Position) -> Any:
        position, axis = at[node.attr("axis").name], node.attr("axis")
        for operand, name in zip(node.args, node.attr("parts"), strict=True):
            size = self.size(operand.type.axis(name).size)  # type: ignore[union-attr]
            if position < size:
                return self.at(operand, {**at, axis.name: -1, name: position})
            position -= size
        raise AssertionError("concat: the parts fill the axis")

    def dot(self, node: Node, at: Position) -> Any:
        a, b = node.args
        terms = (self.at(a, {**at, **k}) * self.at(b, {**at, **k}) for k in self.positions(a.type.dims[1]))
        return _normal(sum(terms))

    def gather(self, node: Node, at: Position) -> Any:
        table, index = node.args
        return self.at(table, {**at, node.attr("axis"): int(self.at(index, at))})

    def pick(self, node: Node, at: Position) -> Any:
        z, label = node.args
        position, size = int(self.at(label, at)), self.size(z.type.axis(node.attr("axis")).size)  # type: ignore[union-attr]
        return self.at(z, {**at, node.attr("axis"): position}) if 0 <= position < size else sympy.Integer(0)

    def where(self, node: Node, at: Position) -> Any:
        condition, a, b = (_normal(self.at(x, at)) for x in node.args)
        if condition in (sympy.true, sympy.false):
            return a if condition else b
        return self.unknowns.apply("where", [condition, a, b])

    def compared(self, node: Node, at: Position) -> Any:
        a, b = (_normal(self.at(x, at)) for x in node.args)
        if a.is_Integer and b.is_Integer:
            return sympy.sympify(_COMPARISONS[node.op](int(a), int(b)))
        return self.unknowns.apply(node.op, [a, b])


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
}

_COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def _operand(e: _Elements, n: Node, at: Position) -> Any:
    return e.at(n.args[0], at)


def _constant(e: _Elements, n: Node, at: Position) -> Any:
    value = n.attr("value")
    return sympy.sympify(value) if math.isfinite(value) and isinstance(value, int) else _float(value)


def _float(value: float) -> Any:
    return sympy.Rational(value) if math.isfinite(value) else sympy.Symbol(str(value))


_ELEMENTS: dict[str, Callable[[_Elements, Node, Position], Any]] = {
    **dict.fromkeys(("cast", "default", "transpose", "layout", "partial"), _operand),
    **dict.fromkeys(_COMPARISONS, _Elements.compared),
    "input": _Elements.input,
    "const": _constant,
    "index": lambda e, n, at: sympy.Integer(at[n.attr("axis").name]),
    "size": lambda e, n, at: sympy.Integer(e.size(n.attr("expr"))),
    "dot": _Elements.dot,
    "slice": lambda e, n, at: e.at(n.args[0], {**at, n.attr("axis"): n.attr("index")}),
    "part": lambda e, n, at: e.at(n.args[0], {**at, n.attr("axis"): e.size(n.attr("start")) + at[n.attr("into").name]}),
    "stack": lambda e, n, at: e.at(n.args[at[n.attr("axis").name]], at),
    "concat": _Elements.concat,
    "gather": _Elements.gather,
    "pick": _Elements.pick,
    "where": _Elements.where,
    "rand": lambda e, n, at: e.unknowns.apply("rand", [sympy.Integer(i) for i in at.values()]),
}
