"""Proof that two programs are equal over the reals, element by element, on small axes.

Every element of a result becomes a sympy expression in the elements of the operands. A rewrite moves sums, products
and quotients around other functions and never looks into those, so ``rsqrt``, ``silu``, ``where`` ... are left
uninterpreted: an application is a new unknown, the same one for equal arguments. What remains is an identity of
rational functions, which sympy decides. Where the polynomials would grow too large the unknowns are random rationals
instead; the arithmetic stays exact, and two different rational functions agree at a random point with a probability of
about degree / range (Schwartz 1980, Zippel 1979).

A derived backward is proved against forward mode: along a direction v of the parameters, ``<d_y, J v> = <d_y J, v>``.
J v comes from dual numbers, the right side from the program. Both take the derivatives of single functions from their
records (``coda.ops``), which tests compare with torch; what is proved is all that the pass makes of them.

Rounding is not seen here: that two programs are equal over the reals says nothing about their bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from coda.ops.calls import Extern
from coda.passes.differentiate import Backward

SYMBOLIC_PRODUCTS = 2  # programs with more products than this are evaluated at random rationals
SYMBOLIC_ELEMENTS = 500  # and so are those whose values have more elements than this
POINTS = 3
MANY_ELEMENTS = 20_000  # from here on one point is enough: there is more to find an error by
RANGE = 10**6

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
        products = max(sum(n.op == "dot" for n in p.nodes()) for p in (before, after))
        symbolic = products <= SYMBOLIC_PRODUCTS and _elements(before, sizes) <= SYMBOLIC_ELEMENTS
    points = _points(before, sizes)
    shown = ", ".join(f"{n}={s}" for n, s in sizes.items())
    method = f"symbolic, {shown}" if symbolic else f"exact, at {_count(points, 'random rational point')}, {shown}"
    for seed in [None] if symbolic else range(points):
        unknowns = _Unknowns(seed)
        elements = [_Elements(p, sizes, unknowns) for p in (before, after)]
        for name in names:
            if difference := _first_difference(name, *elements):
                return Proof(False, method, difference)
    return Proof(True, method)


def prove_gradients(backward: Backward, sizes: Mapping[str, int] | None = None) -> Proof:
    """Whether the gradients of a derived backward are those of its forward."""
    both = backward.joined()
    sizes = _sizes(backward.forward, both) | dict(sizes or {})
    points = _points(backward.forward, sizes)
    shown = ", ".join(f"{n}={s}" for n, s in sizes.items())
    method = f"exact, along {_count(points, 'random direction')}, {shown}"
    seeds = {p.name: p.type for p in both.params} | {p.name: p.type for p in backward.backward.params}
    for seed in range(points):
        unknowns = _Unknowns(seed)
        forward = _Duals(backward.forward, sizes, unknowns, backward.gradients)
        gradients = _Elements(both, sizes, unknowns)
        pushed = pulled = Fraction(0)
        for output in backward.forward.outputs:
            if (name := f"d_{output.name}") in seeds:
                dy = build("input", name=name, type=seeds[name])
                for key, y in forward.output(output.name).items():
                    pushed += gradients.at(dy, dict(key)) * _tangent(y)
        for param, name in backward.gradients.items():
            for key, d in gradients.output(name).items():
                pulled += d * unknowns.operand(_element_name(f"direction {param}", dict(key)))
        for at_results, at_operands in _through_calls(forward, gradients):
            pushed, pulled = pushed + at_operands, pulled + at_results
        if pushed != pulled:
            return Proof(False, method, "the gradients along a direction")
    return Proof(True, method)


def _through_calls(forward: _Duals, gradients: _Elements) -> Iterator[tuple[Any, Any]]:
    """What opaque calls add to both sides. The results of a call move freely, along a direction of their own; its
    declared derivative is a function like any other, whose results are taken for the gradients of the operands. So the
    gradients that it is given are proved, and what is made of those that it returns."""
    made = _calls(forward.program)
    for callee, args in _calls(gradients.program):
        declared = [(f, operands) for f, operands in made if f.backward is callee]
        given = dict(zip((name for name, _ in callee.params), args, strict=True))
        for function, operands in declared:
            known = list(zip((name for name, _ in function.params), operands, strict=True))
            pairs = [(given[name], operand) for name, operand in known if name in given]
            if not all(_same(gradients, a, forward, b) for a, b in pairs):
                continue  # of another call of the function
            at_results = at_operands = Fraction(0)
            for i, (name, _) in enumerate(function.results):
                if (dy := given.get(f"d_{name}")) is not None:
                    result = build("call", *operands, callee=function, result=i)
                    at_results += _paired(gradients, dy, forward, result)
            returned = {name: i for i, (name, _) in enumerate(callee.results)}
            for name, operand in known:
                if f"d_{name}" in returned:
                    gradient = build("call", *args, callee=callee, result=returned[f"d_{name}"])
                    at_operands += _paired(gradients, gradient, forward, operand)
            yield at_results, at_operands


def _calls(program: Program) -> list[tuple[Extern, tuple[Node, ...]]]:
    return list(dict.fromkeys((n.attr("callee"), n.args) for n in program.nodes() if n.op == "call"))


def _same(a: _Elements, x: Node, b: _Elements, y: Node) -> bool:
    return all(_value(a.at(x, at)) == _value(b.at(y, at)) for at in a.positions(x.type.axes))


def _paired(gradients: _Elements, dy: Node, forward: _Duals, y: Node) -> Any:
    """A gradient times the direction in which its value moves."""
    return sum(gradients.at(dy, at) * _tangent(forward.at(y, at)) for at in gradients.positions(dy.type.axes))


def _sizes(*programs: Program) -> dict[str, int]:
    """A size for each axis, and for what else sizes are made of."""
    found: list[sympy.Expr] = [a.size for p in programs for a in p.axes]
    found += [value for p in programs for n in p.nodes() for _, value in n.attrs if isinstance(value, sympy.Expr)]
    symbols = dict.fromkeys(s.name for size in found for s in sorted(size.free_symbols, key=str))
    return {name: 2 + i % 2 for i, name in enumerate(symbols)}


def _elements(program: Program, sizes: Mapping[str, int]) -> int:
    """How many elements the values of a program have, all together."""
    known = {sympy.Symbol(n, integer=True, positive=True): s for n, s in sizes.items()}
    return sum(int(n.type.elements.subs(known)) for n in program.nodes())


def _points(program: Program, sizes: Mapping[str, int]) -> int:
    return 1 if _elements(program, sizes) > MANY_ELEMENTS else POINTS


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _first_difference(name: str, before: _Elements, after: _Elements) -> str | None:
    a, b = before.output(name), after.output(name)
    for position, x in a.items():
        if _normal(x - b[position]) != 0:
            return f"{name}[{', '.join(f'{axis}={i}' for axis, i in position)}]"
    return None


def _normal(x: Any) -> Any:
    """The normal form of a rational function of unknowns."""
    if isinstance(x, (_Dual, Fraction)):
        return x
    x = sympy.sympify(x)
    return x if x.is_Atom else sympy.cancel(sympy.together(x))


class _Unknowns:
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


class _Elements:
    """The elements of a program's values, as sympy expressions, each computed once."""

    def __init__(self, program: Program, sizes: Mapping[str, int], unknowns: _Unknowns):
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
        arguments = [_normal(self.at(a, at)) for a in node.args]
        if node.op in _ARITHMETIC:
            return _normal(_ARITHMETIC[node.op](*arguments))
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
            return _normal(sum(values))
        if node.op == "reduce_mean":
            return _normal(sum(values) / self.unknowns.number(len(values)))
        return self.apply(node.op, sorted(map(_normal, values), key=str))

    def input(self, node: Node, at: Position) -> Any:
        """An element of a parameter. Integers are positions: 0 or 1."""
        if node.dtype.kind != "float":
            return self.unknowns.number(sum(at.values()) % 2)
        return self.unknowns.operand(_element_name(node.attr("name"), at))

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

    def call(self, node: Node, at: Position) -> Any:
        """An opaque function may read all of its operands for each element."""
        if node.args not in self.calls:
            read = [self.at(a, position) for a in node.args for position in self.positions(a.type.axes)]
            self.calls[node.args] = self.unknowns.apply(node.attr("callee").name, [_value(_normal(x)) for x in read])
        name = _element_name(f"result {node.attr('result')}", dict(zip("ijklmn", at.values(), strict=False)))
        return self.unknowns.apply(name, [self.calls[node.args]])

    def gather(self, node: Node, at: Position) -> Any:
        table, index = node.args
        return self.at(table, {**at, node.attr("axis"): int(self.at(index, at))})

    def pick(self, node: Node, at: Position) -> Any:
        z, label = node.args
        position, size = int(self.at(label, at)), self.size(z.type.axis(node.attr("axis")).size)  # type: ignore[union-attr]
        return self.at(z, {**at, node.attr("axis"): position}) if 0 <= position < size else self.unknowns.number(0)

    def where(self, node: Node, at: Position) -> Any:
        condition = _value(_normal(self.at(node.args[0], at)))
        if _is_integer(condition):
            return self.at(node.args[1 if condition else 2], at)
        return self.apply("where", [condition, *(_normal(self.at(x, at)) for x in node.args[1:])])

    def compared(self, node: Node, at: Position) -> Any:
        a, b = (_value(_normal(self.at(x, at))) for x in node.args)
        return self.unknowns.compare(node.op, a, b)


@dataclass(frozen=True)
class _Dual:
    """A value and its derivative along a direction."""

    value: Any
    tangent: Any

    def __add__(self, other: Any) -> _Dual:
        return _Dual(self.value + _value(other), self.tangent + _tangent(other))

    def __neg__(self) -> _Dual:
        return _Dual(-self.value, -self.tangent)

    def __sub__(self, other: Any) -> _Dual:
        return self + -other

    def __rsub__(self, other: Any) -> _Dual:
        return -self + other

    def __mul__(self, other: Any) -> _Dual:
        return _Dual(self.value * _value(other), self.tangent * _value(other) + self.value * _tangent(other))

    def __truediv__(self, other: Any) -> _Dual:
        quotient = self.value / _value(other)
        return _Dual(quotient, (self.tangent - quotient * _tangent(other)) / _value(other))

    def __rtruediv__(self, other: Any) -> _Dual:
        return _Dual(other, Fraction(0)) / self

    __radd__, __rmul__ = __add__, __mul__


def _is_integer(x: Any) -> bool:
    return bool(x.denominator == 1 if isinstance(x, (int, Fraction)) else x.is_Integer)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Dual) else x


def _tangent(x: Any) -> Any:
    return x.tangent if isinstance(x, _Dual) else Fraction(0)


class _Duals(_Elements):
    """Elements with their derivatives along a random direction of the parameters ``moving``."""

    def __init__(self, program: Program, sizes: Mapping[str, int], unknowns: _Unknowns, moving: Collection[str]):
        super().__init__(program, sizes, unknowns)
        self.moving = moving

    def input(self, node: Node, at: Position) -> Any:
        value, name = super().input(node, at), node.attr("name")
        moves = name in self.moving
        return _Dual(value, self.unknowns.operand(_element_name(f"direction {name}", at))) if moves else value

    def call(self, node: Node, at: Position) -> Any:
        value = super().call(node, at)
        return _Dual(value, self.unknowns.operand(f"direction {value}")) if node.dtype.kind == "float" else value

    def apply(self, function: str, arguments: Sequence[Any]) -> Any:
        values = [_value(a) for a in arguments]
        y = super().apply(function, values)
        known = dict(zip("abc", values, strict=False)) | {"y": y, "dy": Fraction(1)}
        texts: tuple[str | None, ...] = OPS[function].derivative or ()
        if OPS[function].family == "reduce":  # of one operand, whose text holds for each of its elements
            texts = texts * len(arguments)
            ties = sum(self.unknowns.compare("eq", v, y) for v in values)
            known |= {"count": Fraction(len(values)), "ties": ties}
        tangent = Fraction(0)
        for text, argument in zip(texts, arguments, strict=False):
            if text is not None and _tangent(argument) != 0:
                own = {"a": _value(argument)} if OPS[function].family == "reduce" else {}
                tangent += self.slope(text, known | own) * _tangent(argument)
        return _Dual(y, tangent)

    def slope(self, text: str, known: Mapping[str, Any]) -> Any:
        """A derivative text at a point."""
        return _At(known, self.unknowns).at(_parsed(text, tuple(known)), {})


@cache
def _parsed(text: str, names: tuple[str, ...]) -> Node:
    return expression(text, None, **{n: build("input", name=n, type=Type(F32)) for n in names})


class _At(_Elements):
    """A text over numbers."""

    def __init__(self, known: Mapping[str, Any], unknowns: _Unknowns):
        super().__init__(Program("at", (), ()), {}, unknowns)
        self.known = known

    def input(self, node: Node, at: Position) -> Any:
        return self.known[node.attr("name")]


def _element_name(name: str, at: Position) -> str:
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


def _operand(e: _Elements, n: Node, at: Position) -> Any:
    return e.at(n.args[0], at)


def _constant(e: _Elements, n: Node, at: Position) -> Any:
    value = n.attr("value")
    return e.unknowns.number(value) if math.isfinite(value) else e.unknowns.operand(str(value))


_ELEMENTS: dict[str, Callable[[_Elements, Node, Position], Any]] = {
    **dict.fromkeys(("cast", "default", "transpose", "layout", "partial"), _operand),
    **dict.fromkeys(_COMPARISONS, _Elements.compared),
    "input": lambda e, n, at: e.input(n, at),
    "const": _constant,
    "index": lambda e, n, at: e.unknowns.number(at[n.attr("axis").name]),
    "size": lambda e, n, at: e.unknowns.number(e.size(n.attr("expr"))),
    "dot": _Elements.dot,
    "call": lambda e, n, at: e.call(n, at),
    "slice": lambda e, n, at: e.at(n.args[0], {**at, n.attr("axis"): n.attr("index")}),
    "part": lambda e, n, at: e.at(n.args[0], {**at, n.attr("axis"): e.size(n.attr("start")) + at[n.attr("into").name]}),
    "stack": lambda e, n, at: e.at(n.args[at[n.attr("axis").name]], at),
    "concat": _Elements.concat,
    "gather": _Elements.gather,
    "pick": _Elements.pick,
    "where": _Elements.where,
    "rand": lambda e, n, at: e.unknowns.apply("rand", [e.unknowns.number(i) for i in at.values()]),
}
