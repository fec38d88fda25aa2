"""The elements of a program's values as exact expressions of the elements of its operands: what proofs compare.

Functions like ``rsqrt`` or ``silu`` are left uninterpreted: an application is an unknown, the same one for equal
arguments. Unknowns are sympy symbols, or random rationals. A ``Dual`` carries a derivative along a direction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import sympy

from coda.dtypes import F32
from coda.errors import CodaError
from coda.frontend import expression
from coda.ir import Axis, Node, Program, Type
from coda.ops import OPS, build

RANGE = 10**6  # of the numerators of random rationals

Position = Mapping[str, int]


class Unknowns:
    """What both programs share: the elements of operands and the applications of uninterpreted functions."""

    def __init__(self, seed: int | None):
        self.seed = seed  # None: operands are symbols
        self.applied: dict[tuple[Any, ...], sympy.Symbol] = {}

    def operand(self, name: str) -> Any:
        return sympy.Symbol(name) if self.seed is None else self.rational(name)

    def rational(self, name: str) -> Any:
        """A random number, the same one for the same name. Halves: sums of products keep small denominators."""
        return Fraction(2 * random.Random(f"{self.seed} {name}").randint(-RANGE, RANGE) + 1, 2)

    def number(self, value: Any) -> Any:
        """A number that the program says: random numbers are Fractions, which are faster than those of sympy."""
        return sympy.Rational(value) if self.seed is None else Fraction(value)

    def apply(self, function: str, arguments: Sequence[Any]) -> Any:
        """The unknown that stands for a function of these arguments."""
        if self.seed is not None:
            return self.rational(f"{function}({', '.join(map(str, arguments))})")
        return self.applied.setdefault((function, *arguments), sympy.Symbol(f"{function}{len(self.applied)}"))

    def compare(self, op: str, a: Any, b: Any) -> Any:
        """A comparison, 1 or 0: decided for integers, else a function like any other."""
        if _is_integer(a) and _is_integer(b):
            return self.number(int(_COMPARISONS[op](int(a), int(b))))
        unknown = self.apply(op, [a, b])
        return unknown if self.seed is None else self.number(int(unknown > 0))


class Elements:
    """The elements of a program's values, as sympy expressions, each computed once."""

    def __init__(self, program: Program, sizes: Mapping[str, int], unknowns: Unknowns):
        self.program, self.unknowns = program, unknowns
        self.symbols = {sympy.Symbol(n, integer=True, positive=True): s for n, s in sizes.items()}
        self.cache: dict[tuple[Node, tuple[int, ...]], Any] = {}
        self.known_sizes: dict[sympy.Expr, int] = {}
        self.calls: dict[tuple[Node, ...], Any] = {}  # what stands for all results of an opaque call of these operands

    def output(self, name: str) -> dict[tuple[tuple[str, int], ...], Any]:
        """The elements of an output, keyed by (axis, position) sorted by axis: layouts may differ."""
        (value,) = (o.value for o in self.program.outputs if o.name == name)
        axes = sorted(value.type.axes, key=lambda a: a.name)
        points = product(*(range(self.size(a.size)) for a in axes))
        keys = (tuple(zip([a.name for a in axes], point, strict=True)) for point in points)
        return {key: self.at(value, dict(key)) for key in keys}

    def size(self, size: sympy.Expr) -> int:
        if size not in self.known_sizes:
            value = size.subs(self.symbols)
            if not value.is_Integer or value < 0:
                raise CodaError.of(f"the size {size} is {value}; give sizes that fit")
            self.known_sizes[size] = int(value)
        return self.known_sizes[size]

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
        arguments = [normal(self.at(a, at)) for a in node.args]
        if node.op in _ARITHMETIC:
            return normal(_ARITHMETIC[node.op](*arguments))
        return self.apply(node.op, arguments)

    def apply(self, function: str, arguments: Sequence[Any]) -> Any:
        return self.unknowns.apply(function, arguments)

    def positions(self, axes: Sequence[Axis]) -> list[dict[str, int]]:
        ranges = [range(self.size(a.size)) for a in axes]
        return [dict(zip([a.name for a in axes], point, strict=True)) for point in product(*ranges)]

    def reduced(self, node: Node, at: Position) -> Any:
        (operand,) = node.args
        over = [a for a in operand.type.axes if a.name in node.attr("axes")]
        values = [self.at(operand, {**at, **p}) for p in self.positions(over)]
        if node.op == "reduce_sum":
            return normal(sum(values))
        if node.op == "reduce_mean":
            return normal(sum(values) / self.unknowns.number(len(values)))
        return self.apply(node.op, sorted(map(normal, values), key=str))

    def input(self, node: Node, at: Position) -> Any:
        """An element of a parameter. Integers are positions: 0 or 1."""
        if node.dtype.kind != "float":
            return self.unknowns.number(sum(at.values()) % 2)
        return self.unknowns.operand(element_name(node.attr("name"), at))

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
        terms = (self.at(a, {**at, **k}) * self.at(b, {**at, **k}) for k in self.positions(a.type.dims[-1]))
        return normal(sum(terms))

    def call(self, node: Node, at: Position) -> Any:
        """An opaque function may read all of its operands for each element."""
        if node.args not in self.calls:
            read = [self.at(a, position) for a in node.args for position in self.positions(a.type.axes)]
            self.calls[node.args] = self.unknowns.apply(node.attr("callee").name, [value_of(normal(x)) for x in read])
        name = element_name(f"result {node.attr('result')}", dict(zip("ijklmn", at.values(), strict=False)))
        return self.unknowns.apply(name, [self.calls[node.args]])

    def gather(self, node: Node, at: Position) -> Any:
        table, index = node.args
        return self.at(table, {**at, node.attr("axis"): int(self.at(index, at))})

    def pick(self, node: Node, at: Position) -> Any:
        z, label = node.args
        position, size = int(self.at(label, at)), self.size(z.type.axis(node.attr("axis")).size)  # type: ignore[union-attr]
        return self.at(z, {**at, node.attr("axis"): position}) if 0 <= position < size else self.unknowns.number(0)

    def where(self, node: Node, at: Position) -> Any:
        condition = value_of(normal(self.at(node.args[0], at)))
        if _is_integer(condition):
            return self.at(node.args[1 if condition else 2], at)
        return self.apply("where", [condition, *(normal(self.at(x, at)) for x in node.args[1:])])

    def compared(self, node: Node, at: Position) -> Any:
        a, b = (value_of(normal(self.at(x, at))) for x in node.args)
        return self.unknowns.compare(node.op, a, b)


class Duals(Elements):
    """Elements with their derivatives along a random direction of the parameters ``moving``."""

    def __init__(self, program: Program, sizes: Mapping[str, int], unknowns: Unknowns, moving: Collection[str]):
        super().__init__(program, sizes, unknowns)
        self.moving = moving

    def input(self, node: Node, at: Position) -> Any:
        value, name = super().input(node, at), node.attr("name")
        moves = name in self.moving
        return Dual(value, self.unknowns.operand(element_name(f"direction {name}", at))) if moves else value

    def call(self, node: Node, at: Position) -> Any:
        value = super().call(node, at)
        return Dual(value, self.unknowns.operand(f"direction {value}")) if node.dtype.kind == "float" else value

    def apply(self, function: str, arguments: Sequence[Any]) -> Any:
        values = [value_of(a) for a in arguments]
        y = super().apply(function, values)
        known = dict(zip("abc", values, strict=False)) | {"y": y, "dy": Fraction(1)}
        texts: tuple[str | None, ...] = OPS[function].derivative or ()
        if OPS[function].family == "reduce":  # of one operand, whose text holds for each of its elements
            texts = texts * len(arguments)
            ties = sum(self.unknowns.compare("eq", v, y) for v in values)
            known |= {"count": Fraction(len(values)), "ties": ties}
        tangent = Fraction(0)
        for text, argument in zip(texts, arguments, strict=False):
            if text is not None and tangent_of(argument) != 0:
                own = {"a": value_of(argument)} if OPS[function].family == "reduce" else {}
                tangent += self.slope(text, known | own) * tangent_of(argument)
        return Dual(y, tangent)

    def slope(self, text: str, known: Mapping[str, Any]) -> Any:
        """A derivative text at a point."""
        return _At(known, self.unknowns).at(_parsed(text, tuple(known)), {})


@cache
def _parsed(text: str, names: tuple[str, ...]) -> Node:
    return expression(text, None, **{n: build("input", name=n, type=Type(F32)) for n in names})


class _At(Elements):
    """A text over numbers."""

    def __init__(self, known: Mapping[str, Any], unknowns: Unknowns):
        super().__init__(Program("at", (), ()), {}, unknowns)
        self.known = known

    def input(self, node: Node, at: Position) -> Any:
        return self.known[node.attr("name")]


@dataclass(frozen=True)
class Dual:
    """A value and its derivative along a direction."""

    value: Any
    tangent: Any

    def __add__(self, other: Any) -> Dual:
        return Dual(self.value + value_of(other), self.tangent + tangent_of(other))

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.tangent)

    def __sub__(self, other: Any) -> Dual:
        return self + -other

    def __rsub__(self, other: Any) -> Dual:
        return -self + other

    def __mul__(self, other: Any) -> Dual:
        return Dual(self.value * value_of(other), self.tangent * value_of(other) + self.value * tangent_of(other))

    def __truediv__(self, other: Any) -> Dual:
        quotient = self.value / value_of(other)
        return Dual(quotient, (self.tangent - quotient * tangent_of(other)) / value_of(other))

    def __rtruediv__(self, other: Any) -> Dual:
        return Dual(other, Fraction(0)) / self

    __radd__, __rmul__ = __add__, __mul__


def _is_integer(x: Any) -> bool:
    return bool(x.denominator == 1 if isinstance(x, (int, Fraction)) else x.is_Integer)


def value_of(x: Any) -> Any:
    """A number, or that of a dual."""
    return x.value if isinstance(x, Dual) else x


def tangent_of(x: Any) -> Any:
    """The derivative of a dual; anything else does not move."""
    return x.tangent if isinstance(x, Dual) else Fraction(0)


def normal(x: Any) -> Any:
    """The normal form of a rational function of unknowns."""
    if isinstance(x, (Dual, Fraction)):
        return x
    x = sympy.sympify(x)
    return x if x.is_Atom else sympy.cancel(sympy.together(x))


def element_name(name: str, at: Position) -> str:
    """What one element of a tensor is called: ``w_K0_N1``."""
    return "_".join([name, *(f"{a}{i}" for a, i in sorted(at.items()))])


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


def _operand(e: Elements, n: Node, at: Position) -> Any:
    return e.at(n.args[0], at)


def _constant(e: Elements, n: Node, at: Position) -> Any:
    value = n.attr("value")
    return e.unknowns.number(value) if math.isfinite(value) else e.unknowns.operand(str(value))


_ELEMENTS: dict[str, Callable[[Elements, Node, Position], Any]] = {
    **dict.fromkeys(("cast", "default", "transpose", "layout", "partial", "finish"), _operand),
    **dict.fromkeys(_COMPARISONS, Elements.compared),
    "input": lambda e, n, at: e.input(n, at),
    "const": _constant,
    "index": lambda e, n, at: e.unknowns.number(at[n.attr("axis").name]),
    "size": lambda e, n, at: e.unknowns.number(e.size(n.attr("expr"))),
    "dot": Elements.dot,
    "call": lambda e, n, at: e.call(n, at),
    "slice": lambda e, n, at: e.at(n.args[0], {**at, n.attr("axis"): n.attr("index")}),
    "part": lambda e, n, at: e.at(n.args[0], {**at, n.attr("axis"): e.size(n.attr("start")) + at[n.attr("into").name]}),
    "stack": lambda e, n, at: e.at(n.args[at[n.attr("axis").name]], at),
    "concat": Elements.concat,
    "gather": Elements.gather,
    "pick": Elements.pick,
    "where": Elements.where,
    "rand": lambda e, n, at: e.unknowns.apply("rand", [e.unknowns.number(i) for i in at.values()]),
}
