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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy

from coda.errors import CodaError
from coda.ir import Node, Program
from coda.ops import build
from coda.ops.calls import Extern
from coda.passes.differentiate import Backward
from coda.passes.elements import Duals, Elements, Unknowns, element_name, normal, tangent_of, value_of

SYMBOLIC_PRODUCTS = 2  # programs with more products than this are evaluated at random rationals
SYMBOLIC_ELEMENTS = 500  # and so are those whose values have more elements than this
POINTS = 3
MANY_ELEMENTS = 20_000  # from here on one point is enough: there is more to find an error by
MOST_ELEMENTS = 200_000  # beyond this the exact arithmetic would take hours


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
    """Compare the outputs that both programs have. ``sizes`` gives free axes (by default 2 and 3 by turns). Raises
    CodaError where they have none, or where static axes make the programs too large."""
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
        unknowns = Unknowns(seed)
        elements = [Elements(p, sizes, unknowns) for p in (before, after)]
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
        unknowns = Unknowns(seed)
        forward = Duals(backward.forward, sizes, unknowns, backward.gradients)
        gradients = Elements(both, sizes, unknowns)
        pushed = pulled = Fraction(0)
        for output in backward.forward.outputs:
            if (name := f"d_{output.name}") in seeds:
                dy = build("input", name=name, type=seeds[name])
                for key, y in forward.output(output.name).items():
                    pushed += gradients.at(dy, dict(key)) * tangent_of(y)
        for param, name in backward.gradients.items():
            for key, d in gradients.output(name).items():
                pulled += d * unknowns.operand(element_name(f"direction {param}", dict(key)))
        for at_results, at_operands in _through_calls(forward, gradients):
            pushed, pulled = pushed + at_operands, pulled + at_results
        if pushed != pulled:
            return Proof(False, method, "the gradients along a direction")
    return Proof(True, method)


def _through_calls(forward: Duals, gradients: Elements) -> Iterator[tuple[Any, Any]]:
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


def _same(a: Elements, x: Node, b: Elements, y: Node) -> bool:
    return all(value_of(a.at(x, at)) == value_of(b.at(y, at)) for at in a.positions(x.type.axes))


def _paired(gradients: Elements, dy: Node, forward: Duals, y: Node) -> Any:
    """A gradient times the direction in which its value moves."""
    return sum(gradients.at(dy, at) * tangent_of(forward.at(y, at)) for at in gradients.positions(dy.type.axes))


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
    """At how many points to compare. Raises CodaError where even one would take too long."""
    elements = _elements(program, sizes)
    if elements > MOST_ELEMENTS:
        raise CodaError.of(
            f"a proof of '{program.name}' would compute {elements} elements one by one; it is for small sizes",
            "the sizes are those of its constants and numbers: give small ones, as in --const HQ=2,HK=1,f=2",
        )
    return 1 if elements > MANY_ELEMENTS else POINTS


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _first_difference(name: str, before: Elements, after: Elements) -> str | None:
    a, b = before.output(name), after.output(name)
    for position, x in a.items():
        if normal(x - b[position]) != 0:
            return f"{name}[{', '.join(f'{axis}={i}' for axis, i in position)}]"
    return None
